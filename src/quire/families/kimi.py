"""Kimi Linear (arXiv:2510.26692) and Ling 3: a delta rule with a decay per channel, latent attention in some layers.

Experts are those of DeepSeek-V3. Kimi Linear's attention has no positions; Ling's has a gate per head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.errors import ModelLoadError
from quire.families.deepseek import NAMES as DEEPSEEK_NAMES
from quire.families.deepseek import check_routing, latent_attention, mixture_sizes
from quire.families.shape import Fields, activation, assemble
from quire.families.weights import TOP_NAMES, Family, Take, WeightMap, build_map, expert_rules, expert_takes
from quire.modelspec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from quire.recurrent_spec import ChannelGateSpec, RecurrentSpec

# The key of transformers → the one that published files have.
_OTHER_NAMES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
# What both families have in a file without the key, as in transformers, and what they differ in.
_DEFAULTS = {
    "num_attention_heads": 32, "n_shared_experts": 1, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
}  # fmt: skip
_KIMI = {"n_routed_experts": 256, "routed_scaling_factor": 2.446, "n_group": 1, "topk_group": 1}
_LING = {
    "n_routed_experts": 512, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "rope_theta": 6_000_000.0,
    "first_k_dense_replace": 2, "head_dim": 128,
}  # fmt: skip
# Canonical name of a recurrent layer's weight → its name after the folder of the layer's mixer.
_DELTA = {
    **{f"kda.{part}.weight": f"{part}_proj.weight" for part in ("q", "k", "v", "f", "b", "o", "f_a", "f_b")},
    **{f"kda.z{part}.weight": f"g{part}_proj.weight" for part in ("", "_a", "_b")},
    "kda.dt_bias": "dt_bias",
    "kda.norm.weight": "o_norm.weight",
}
_SHARED = ("gate", "up", "down")
_KIMI_NAMES = {
    **DEEPSEEK_NAMES,
    **{name: f"self_attn.{stored}" for name, stored in _DELTA.items()},
    "moe.router.weight": "block_sparse_moe.gate.weight",
    "moe.correction_bias": "block_sparse_moe.gate.e_score_correction_bias",
    **{f"moe.shared.{n}.weight": f"block_sparse_moe.shared_experts.{n}_proj.weight" for n in _SHARED},
}
_LING_NAMES = {
    **{name: stored.replace("self_attn.", "attention.") for name, stored in DEEPSEEK_NAMES.items()},
    **{name: f"attention.{stored}" for name, stored in _DELTA.items()},
    "attn.o.weight": "attention.dense.weight",
    "kda.o.weight": "attention.dense.weight",
    "attn.gate.weight": "attention.g_proj.weight",
    "moe.correction_bias": "mlp.gate.expert_bias",
}
_LING_TOP = {**TOP_NAMES, "embed.weight": "model.word_embeddings.weight"}
# Which keys decide about tensors, beside those of other families.
_KINDS = ("layer_types", "linear_attn_config", "layer_group_size")
_KEYS = (
    (r"(self_attn|attention)\.(A_log|dt_bias|o_norm\.weight|\w_conv1d\.weight|[fgb](_[ab])?_proj\.weight)",
     ("linear_attn_config", "head_dim", "num_attention_heads", "short_conv_kernel_size", *_KINDS)),
    (r"(self_attn|attention)\..*", (*_KINDS, "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")),
    (r"(mlp|block_sparse_moe)\..*", ("mlp_layer_types", "first_k_dense_replace")),
)  # fmt: skip


def read_kimi_linear(f: Fields) -> ModelSpec:
    f = _named(f, _KIMI)
    f.refuse("mla_use_nope", unless=(True,), why="attention of this family has no positions")
    f.refuse("rope_scaling", unless=(), why="attention of this family has no positions")
    rope = f.nested("rope_parameters") or Fields({}, f.where)
    rope.refuse("rope_type", unless=("default",), why="attention of this family has no positions")
    f.refuse("moe_router_activation_func", unless=("sigmoid",), why="routing of this family")
    if f.integer("n_group") > 1:
        f.refuse("use_grouped_topk", unless=(True,), why="a token chooses groups of experts first")
    f.refuse("moe_layer_freq", unless=(1,), why="no published model of this family skips layers")
    f.refuse(
        "num_nextn_predict_layers", unless=(0,), why="layers for multi-token prediction are not built here"
    )
    own = f.nested("linear_attn_config") or Fields({}, f"{f.where}, linear_attn_config")
    count = f.integer("num_hidden_layers", 27)
    heads = own.integer("num_heads", f.integer("linear_num_heads", 32))
    dim = own.integer("head_dim", f.integer("linear_head_dim", 128))
    taps = own.integer("short_conv_kernel_size", f.integer("linear_conv_kernel_dim", 4), minimum=2)
    delta = _recurrent(f, heads, dim, taps, ChannelGateSpec(dim, None))
    attn = replace(latent_attention(f, interleaved=False), rope=None)
    return _assemble(f, "kimi_linear", attn, delta, _kinds_of_lists(f, own, count), 1, 1e-5)


def read_bailing_hybrid(f: Fields) -> ModelSpec:
    f = _named(f, _LING)
    f.refuse("use_qkv_bias", unless=(False,), why="no published model of this family has it")
    f.refuse("no_kda_lora", unless=(True,), why="decays and gates of this family have one projection each")
    f.refuse("rope_interleave", unless=(True,), why="neighbouring numbers rotate together")
    for key in ("score_function", "scoring_func"):
        f.refuse(key, unless=("sigmoid",), why="routing of this family")
    f.refuse("topk_method", unless=("noaux_tc",), why="routing of this family")
    f.refuse(
        "gated_attention_proj_granularity_type", unless=("head_wise",), why="attention has a gate per head"
    )
    for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        if any(f.items(key)):
            f.refuse(key, unless=(), why="experts whose activations are clamped are not built")
    heads, count = f.integer("num_attention_heads"), f.integer("num_hidden_layers", 42)
    floor = f.number("kda_lower_bound", -5.0, positive=False) if f.flag("kda_safe_gate", True) else None
    if floor is not None and floor >= 0:
        raise f.wrong("kda_lower_bound", "a number < 0, the least logarithm of a decay")
    dim = f.integer("linear_head_dim", f.integer("head_dim"))
    taps = f.integer("short_conv_kernel_size", 4, minimum=2)
    delta = _recurrent(f, heads, dim, taps, ChannelGateSpec(0, floor))
    size = f.integer("layer_group_size", 6)
    if count % size and not f.has("layer_types"):
        raise f.wrong(
            "layer_group_size", f"a divisor of num_hidden_layers = {count}, or layer_types beside it"
        )
    default = ["linear_attention" if (i + 1) % size else "full_attention" for i in range(count)]
    attn = replace(latent_attention(f, interleaved=True), output_gate="head")
    return _assemble(f, "bailing_hybrid", attn, delta, f.texts("layer_types") or default, 2, 1e-6)


def _named(f: Fields, defaults: Mapping[str, Any]) -> Fields:
    """Return the fields under the names of transformers, with the family's defaults where a file has none."""
    values = {key: value for key, value in f.values.items() if value is not None}
    for key, other in (*_OTHER_NAMES.items(), ("n_routed_experts", "num_local_experts")):
        if key in values and other in values and values[key] != values[other]:
            raise ModelLoadError(
                f"{f.where}: {key} = {values[key]!r} and {other} = {values[other]!r} say two things: keep the one that "
                "the model was trained with."
            )
        if other in values:
            values[key] = values[other]
    return Fields({**_DEFAULTS, **defaults, **values}, f.where)


def _kinds_of_lists(f: Fields, own: Fields, count: int) -> list[Any]:
    """Return the type of each layer: ``layer_types``, or the two lists of layers, which count from 1."""
    if f.has("layer_types"):
        return f.texts("layer_types")
    full, delta = own.integers("full_attn_layers"), own.integers("kda_layers")
    if not full and not delta:
        return ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(count)]
    if sorted((*full, *delta)) != list(range(1, count + 1)):
        raise own.wrong("full_attn_layers", f"with kda_layers, each of the layers 1…{count} once")
    return ["full_attention" if i + 1 in full else "linear_attention" for i in range(count)]


def _recurrent(f: Fields, heads: int, dim: int, taps: int, gate: ChannelGateSpec) -> RecurrentSpec:
    if activation(f) != "silu":
        raise f.wrong("hidden_act", "'silu', which the convolution of this family has")
    if dim % 4:
        raise f.wrong("head_dim", "a multiple of 4 in recurrent layers")
    return RecurrentSpec("channel_delta", heads, heads, dim, dim, taps, 3 * heads * dim, gate=gate)


def _assemble(
    f: Fields,
    family: str,
    attn: AttentionSpec,
    delta: RecurrentSpec,
    kinds: list[Any],
    first: int,
    eps: float,
) -> ModelSpec:
    """``first``: dense layers before those with experts, in a file that does not say."""
    f.refuse("attention_bias", unless=(False,), why="no published model of this family has it")
    count, heads = len(kinds), f.integer("num_attention_heads")
    if f.integer("num_key_value_heads", heads) != heads:
        raise f.wrong("num_key_value_heads", f"num_attention_heads = {heads}")
    if count != f.integer("num_hidden_layers", count) or set(kinds) - {"linear_attention", "full_attention"}:
        allowed = "a list of num_hidden_layers entries 'linear_attention' or 'full_attention'"
        raise f.wrong("layer_types", allowed)
    if "full_attention" not in kinds:
        raise f.wrong("layer_types", "a list with one 'full_attention' at least")
    moe = mixture_sizes(
        f, scoring="sigmoid", normalize_topk=f.flag("norm_topk_prob", True), correction_bias=True,
        routed_scale=f.number("routed_scaling_factor"), num_groups=f.integer("n_group"),
        topk_groups=f.integer("topk_group"), group_score="top2_sum",
    )  # fmt: skip
    check_routing(f, moe)
    dense = MlpSpec(f.integer("intermediate_size"), activation(f))
    sparse = MlpSpec(moe.intermediate_size, activation(f), moe=moe)
    first = f.integer("first_k_dense_replace", first, minimum=0)
    blocks = f.texts("mlp_layer_types") or ["dense" if i < first else "sparse" for i in range(count)]
    if len(blocks) != count or set(blocks) - {"dense", "sparse"}:
        raise f.wrong("mlp_layer_types", f"a list of num_hidden_layers = {count} entries 'dense' or 'sparse'")
    layers = [
        LayerSpec(
            attn if kind == "full_attention" else None,
            dense if block == "dense" else sparse,
            recurrent=delta if kind == "linear_attention" else None,
        )
        for kind, block in zip(kinds, blocks, strict=True)
    ]
    return assemble(f, family, layers, eps=eps)


def _state_takes(
    spec: ModelSpec, index: int, folder: str, rate_shape: tuple[int, ...]
) -> dict[str, tuple[Take, ...]]:
    """Return takes for the convolution, which is stored as one or as three, and for the rate of decay."""
    r = spec.layers[index].recurrent
    if r is None:
        return {}
    takes: dict[str, tuple[Take, ...]] = {}
    whole, start = (r.conv_channels, 1, r.conv_kernel), 0
    for part, width in (("q", r.k_width), ("k", r.k_width), ("v", r.v_width)):
        own = Take((f"{folder}{part}_conv1d.weight",), (width, 1, r.conv_kernel), encoding="taps")
        fused = Take((f"{folder}conv1d.weight",), whole, start=start, stop=start + width, encoding="taps")
        takes[f"kda.conv_{part}.weight"] = own, fused
        start += width
    takes["kda.rate"] = (Take((f"{folder}A_log",), rate_shape, encoding="rate"),)
    return takes


def _kimi_rules(spec: ModelSpec, index: int, prefix: str) -> dict[str, tuple[Take, ...]]:
    r = spec.layers[index].recurrent
    takes = _state_takes(spec, index, f"{prefix}self_attn.", (1, 1, r.num_v_heads if r else 0, 1))
    mlp = spec.layers[index].mlp
    for part in _SHARED if mlp.moe is None else ():
        shape = (mlp.intermediate_size, spec.hidden_size)
        # transformers 5 saves dense blocks under the folder of the experts.
        folders = f"{prefix}mlp.", f"{prefix}block_sparse_moe."
        takes[f"mlp.{part}.weight"] = tuple(
            Take((f"{folder}{part}_proj.weight",), shape[::-1] if part == "down" else shape)
            for folder in folders
        )
    if mlp.moe is not None:
        folder = f"{prefix}block_sparse_moe.experts."
        takes |= expert_takes(spec, index, folder, ("w1", "w3", "w2"), f"{prefix}mlp.experts.")
    return takes


def _ling_rules(spec: ModelSpec, index: int, prefix: str) -> dict[str, tuple[Take, ...]]:
    r = spec.layers[index].recurrent
    takes = _state_takes(spec, index, f"{prefix}attention.", (r.num_v_heads if r else 0,))
    return takes | expert_rules(spec, index, prefix)


def kimi_weights(spec: ModelSpec) -> WeightMap:
    return replace(build_map(spec, _KIMI_NAMES, _kimi_rules), keys=_KEYS)


def ling_weights(spec: ModelSpec) -> WeightMap:
    """Ignore layers from ``num_hidden_layers`` on: those for multi-token prediction, which the decoder does not use."""
    extra = rf"model\.layers\.({spec.num_layers}|{spec.num_layers + 1})\..*"
    return replace(build_map(spec, _LING_NAMES, _ling_rules, ignore=(extra,), top=_LING_TOP), keys=_KEYS)


KIMI_LINEAR = Family("kimi_linear", read_kimi_linear, kimi_weights)
BAILING_HYBRID = Family("bailing_hybrid", read_bailing_hybrid, ling_weights)
