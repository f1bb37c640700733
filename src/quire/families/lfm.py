"""LFM2 (Liquid AI 2025), LFM2-MoE and LFM3: short convolutions between gates in most layers, attention in the others.

LFM3 has norms around both blocks, windows in some of its attention layers, and a gate per head on their output.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from quire.families.rope import rope_from_config
from quire.families.shape import Fields, assemble, attention, biases, head_dim_of, window_of
from quire.families.weights import (
    LLAMA_NAMES,
    TOP_NAMES,
    Family,
    Take,
    WeightMap,
    build_map,
    expert_takes,
)
from quire.modelspec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from quire.recurrent_spec import RecurrentSpec

_FEED = {"gate": "w1", "up": "w3", "down": "w2"}
_NAMES = {
    **LLAMA_NAMES,
    "attn_norm.weight": "operator_norm.weight",
    "mlp_norm.weight": "ffn_norm.weight",
    "attn_post_norm.weight": "post_operator_norm.weight",
    "mlp_post_norm.weight": "post_ffn_norm.weight",
    "attn.gate.weight": "self_attn.gate_proj.weight",
    "conv.taps.bias": "conv.conv.bias",
    "conv.o.weight": "conv.out_proj.weight",
    "conv.o.bias": "conv.out_proj.bias",
    "moe.router.weight": "feed_forward.gate.weight",
    "moe.correction_bias": "feed_forward.expert_bias",
    **{f"mlp.{part}.weight": f"feed_forward.{name}.weight" for part, name in _FEED.items()},
}
# LFM2's names of what LFM3 calls as Llama does.
_LFM2_NAMES = {
    **_NAMES,
    "attn.o.weight": "self_attn.out_proj.weight",
    "attn.q_norm.weight": "self_attn.q_layernorm.weight",
    "attn.k_norm.weight": "self_attn.k_layernorm.weight",
}
_TOP = {**TOP_NAMES, "norm.weight": "model.embedding_norm.weight"}
# Which keys decide about tensors, beside those of other families.
_KINDS = ("layer_types", "full_attn_idxs")
_KEYS = (
    (r"layers\.\d+\.conv\..*", (*_KINDS, "conv_L_cache", "conv_bias", "hidden_size")),
    (r"self_attn\.gate_proj\.weight", ("use_attention_gate", "num_attention_heads", *_KINDS)),
    (r"self_attn\.(q|k)_(layer)?norm\.weight", (*_KINDS, "head_dim", "num_attention_heads")),
    (r"self_attn\..*", (*_KINDS, "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")),
    (r"post_(operator|ffn)_norm\.weight", ("use_sandwich_norm", "hidden_size")),
    (r"feed_forward\.(experts|gate|expert_bias).*",
     ("num_experts", "num_dense_layers", "use_expert_bias", "moe_intermediate_size", "hidden_size")),
    (r"feed_forward\.w\d\.weight",
     ("intermediate_size", "block_ff_dim", "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of",
      "num_dense_layers", "hidden_size")),
)  # fmt: skip
_LFM3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1_000_000.0},
}


def read_lfm2(f: Fields) -> ModelSpec:
    f = _with_defaults(f, 32)
    attending = (
        f.integers("full_attn_idxs") if f.has("full_attn_idxs") else range(f.integer("num_hidden_layers"))
    )
    default = ["full_attention" if i in attending else "conv" for i in range(f.integer("num_hidden_layers"))]
    mlp = MlpSpec(_width(f), "silu")
    return _assemble(f, "lfm2", _kinds(f, default), [mlp] * f.integer("num_hidden_layers"))


def read_lfm2_moe(f: Fields) -> ModelSpec:
    f = _with_defaults(f, 32)
    count, dense = f.integer("num_hidden_layers"), f.integer("num_dense_layers", 2, minimum=0)
    if not f.texts("layer_types"):
        raise f.wrong("layer_types", f"a list of num_hidden_layers = {count} entries")
    moe = MoeSpec(
        num_experts=f.integer("num_experts", 32),
        top_k=f.integer("num_experts_per_tok", 4),
        intermediate_size=f.integer("moe_intermediate_size", 1792),
        scoring="sigmoid",
        normalize_topk=f.flag("norm_topk_prob", True),
        routed_scale=f.number("routed_scaling_factor", 1.0),
        correction_bias=f.flag("use_expert_bias", True),
    )
    if moe.top_k > moe.num_experts:
        raise f.wrong("num_experts_per_tok", f"at most the {moe.num_experts} experts")
    plain, sparse = MlpSpec(f.integer("intermediate_size", 7168)), MlpSpec(moe.intermediate_size, moe=moe)
    return _assemble(
        f, "lfm2_moe", _kinds(f, ()), [plain if index < dense else sparse for index in range(count)]
    )


def read_lfm3(f: Fields) -> ModelSpec:
    f.refuse("rope_local_base_freq", unless=(), why="rope_parameters says it here")
    f = _with_defaults(f, 24)
    if f.nested("rope_parameters") is None:
        f = Fields({**f.values, "rope_parameters": _LFM3_ROPE}, f.where)
    default = [
        "full_attention" if i % 4 == 2 else "sliding_attention" if i % 4 == 0 and i else "conv"
        for i in range(f.integer("num_hidden_layers"))
    ]
    mlp = MlpSpec(f.integer("intermediate_size", 7680), "silu")
    return _assemble(f, "lfm3", _kinds(f, default), [mlp] * len(default))


def _with_defaults(f: Fields, num_layers: int) -> Fields:
    """Return the fields with the names and the defaults that this family has for what others call otherwise."""
    values = {
        **f.values,
        "rms_norm_eps": f.number("norm_eps", f.number("rms_norm_eps", 1e-5)),
        "num_hidden_layers": f.integer("num_hidden_layers", num_layers),
        "max_position_embeddings": f.integer("max_position_embeddings", 128_000),
        "tie_word_embeddings": f.flag("tie_embedding", f.flag("tie_word_embeddings", True)),
    }
    return Fields(values, f.where)


def _width(f: Fields) -> int:
    """Return the width of LFM2's dense blocks, of which the file has a number that is adjusted."""
    width = f.integer("block_ff_dim", f.integer("intermediate_size", 12_288))
    if not f.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    if "block_ffn_dim_multiplier" in f.values and not f.has("block_ffn_dim_multiplier"):
        return width
    multiple = f.integer("block_multiple_of", 256)
    return multiple * -(-int(f.number("block_ffn_dim_multiplier", 1.0) * width) // multiple)


def _kinds(f: Fields, default: list[str] | tuple[()]) -> list[str]:
    count, allowed = f.integer("num_hidden_layers"), {"conv", "full_attention"}
    allowed |= {"sliding_attention"} if "sliding_attention" in default else set()
    kinds = f.texts("layer_types") or list(default)
    if len(kinds) != count or set(kinds) - allowed:
        names = " or ".join(repr(name) for name in sorted(allowed))
        raise f.wrong("layer_types", f"a list of num_hidden_layers = {count} entries {names}")
    return kinds


def _assemble(f: Fields, family: str, kinds: list[str], mlps: list[MlpSpec]) -> ModelSpec:
    is_lfm3, taps = family == "lfm3", f.integer("conv_L_cache", 7 if family == "lfm3" else 3, minimum=2)
    bias, hidden = f.flag("conv_bias", False), f.integer("hidden_size")
    conv = RecurrentSpec("short_conv", 0, 0, 0, 0, taps, hidden, conv_bias=bias, bias=bias)
    norms: Literal["pre", "sandwich"] = "sandwich" if is_lfm3 and f.flag("use_sandwich_norm", True) else "pre"
    layers = []
    for kind, mlp in zip(kinds, mlps, strict=True):
        attn = None if kind == "conv" else _attention(f, kind, is_lfm3=is_lfm3)
        layers.append(LayerSpec(attn, mlp, norms, conv if kind == "conv" else None))
    if not any(layer.attn for layer in layers):
        raise f.wrong("layer_types", "a list with one layer that attends at least")
    return assemble(f, family, layers, tied=True)


def _attention(f: Fields, kind: str, *, is_lfm3: bool) -> AttentionSpec:
    if not is_lfm3:
        return attention(f, rope=rope_from_config(f, head_dim_of(f), default_theta=1e6), qk_norm="head")
    parameters, head_dim = f.nested("rope_parameters"), f.integer("head_dim", 128)
    of_kind = None if parameters is None else parameters.nested(kind)
    if of_kind is None or not of_kind.has("rope_theta"):
        raise f.wrong("rope_parameters", f"an object with {kind}, which has rope_theta")
    rope = rope_from_config(f, head_dim, layer_type=kind)
    more: dict[str, Any] = {
        "output_gate": "head" if f.flag("use_attention_gate", True) else False,
        **biases(f),
    }
    return attention(f, rope=rope, head_dim=head_dim, window=window_of(f, kind, 256), qk_norm="head", **more)


def _rules(spec: ModelSpec, index: int, prefix: str) -> dict[str, tuple[Take, ...]]:
    """`LayerRules`: the rows of b, c and x lie one after the other."""
    layer = spec.layers[index]
    takes: dict[str, tuple[Take, ...]] = {}
    if (r := layer.recurrent) is not None:
        rows = r.conv_channels
        for number, part in enumerate(("b", "c", "x")):
            for kind, shape in (("weight", (3 * rows, spec.hidden_size)), ("bias", (3 * rows,))):
                take = Take(
                    (f"{prefix}conv.in_proj.{kind}",), shape, start=number * rows, stop=(number + 1) * rows
                )
                takes[f"conv.{part}.{kind}"] = (take,)
        takes["conv.taps.weight"] = (
            Take((f"{prefix}conv.conv.weight",), (rows, 1, r.conv_kernel), encoding="taps"),
        )
    if layer.mlp.moe is not None:
        folder = f"{prefix}feed_forward.experts."
        takes |= expert_takes(spec, index, folder, ("w1", "w3", "w2"), folder)
    return takes


def weights(spec: ModelSpec) -> WeightMap:
    return replace(build_map(spec, _LFM2_NAMES, _rules, top=_TOP), keys=_KEYS)


def lfm3_weights(spec: ModelSpec) -> WeightMap:
    return replace(build_map(spec, _NAMES, _rules, top=_TOP), keys=_KEYS)


LFM2 = Family("lfm2", read_lfm2, weights)
LFM2_MOE = Family("lfm2_moe", read_lfm2_moe, weights)
LFM3 = Family("lfm3", read_lfm3, lfm3_weights)
