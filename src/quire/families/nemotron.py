"""Nemotron-H (NVIDIA 2025, arXiv:2504.03624), Nemotron Nano 2 and Nemotron 3.

A block is one of Mamba-2, attention, an MLP and experts. MLPs have no gate.
"""

from __future__ import annotations

import math
from dataclasses import replace

from quire.families.mamba import (
    KEYS,
    KIND_KEYS,
    layer_kinds,
    mamba_names,
    mamba_takes,
    scan_of,
    with_length,
)
from quire.families.shape import Fields, assemble, attention
from quire.families.weights import Family, Take, WeightMap, build_map
from quire.modelspec import LayerSpec, MlpSpec, ModelSpec, MoeSpec
from quire.recurrent_spec import RecurrentSpec

# Every block is called a mixer.
_NAMES = {
    "attn_norm.weight": "norm.weight",
    "mlp_norm.weight": "norm.weight",
    **mamba_names("mixer"),
    **{f"attn.{n}.weight": f"mixer.{n}_proj.weight" for n in "qkvo"},
    **{f"mlp.{n}.{kind}": f"mixer.{n}_proj.{kind}" for n in ("up", "down") for kind in ("weight", "bias")},
    **{f"moe.shared.{n}.weight": f"mixer.shared_experts.{n}_proj.weight" for n in ("up", "down")},
    "moe.router.weight": "mixer.gate.weight",
    "moe.correction_bias": "mixer.gate.e_score_correction_bias",
    "moe.latent_in.weight": "mixer.fc1_latent_proj.weight",
    "moe.latent_out.weight": "mixer.fc2_latent_proj.weight",
}
_TOP = {
    "embed.weight": "backbone.embeddings.weight",
    "norm.weight": "backbone.norm_f.weight",
    "lm_head.weight": "lm_head.weight",
}
_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_KEYS = (
    (r"mixer\.(up|down)_proj\.bias", ("mlp_bias", *KIND_KEYS)),
    (r"mixer\.(gate|experts|shared_experts|fc\d_latent_proj)\..*",
     ("n_routed_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size",
      "hidden_size", *KIND_KEYS)),
    (r"mixer\.(up|down)_proj\.weight", ("intermediate_size", "hidden_size", *KIND_KEYS)),
    (r"mixer\.[qkvo]_proj\.weight",
     ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", *KIND_KEYS)),
    (r"embeddings\.weight", ("vocab_size", "hidden_size")),
    *KEYS,
)  # fmt: skip
# Older name of a key → that of transformers 5. The older one counts where both are.
_OLDER = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
}


def read_nemotron_h(f: Fields) -> ModelSpec:
    f = Fields({**f.values, **{new: f.values[old] for old, new in _OLDER.items() if f.has(old)}}, f.where)
    f = Fields({"num_attention_heads": 32, "num_key_value_heads": 8, **f.values}, f.where)
    f.refuse("sliding_window", unless=(), why="attention of this family sees everything")
    if f.text("mlp_hidden_act", "relu2") != "relu2":
        raise f.wrong("mlp_hidden_act", "'relu2', which the MLPs of this family have")
    if f.text("mamba_hidden_act", "silu") not in ("silu", "swish"):
        raise f.wrong("mamba_hidden_act", "'silu', which the convolution of this family has")
    f.refuse("attention_bias", unless=(False,), why="no published Nemotron-H has it")
    attn = attention(f, rope=None, head_dim=f.integer("head_dim", 128))
    kinds, bias, none = _kinds(f), f.flag("mlp_bias", False), MlpSpec(0)
    dense = MlpSpec(f.integer("intermediate_size", 21_504), "relu2", bias)
    blocks = {
        "linear_attention": LayerSpec(None, none, recurrent=_mamba(f)),
        "full_attention": LayerSpec(attn, none),
        "mlp": LayerSpec(None, dense),
    }
    if "moe" in kinds:
        if bias:
            raise f.wrong("mlp_bias", "false where there are experts")
        blocks["moe"] = LayerSpec(None, _experts(f))
    if "full_attention" not in kinds:
        raise f.wrong("layers_block_type", "a list with one block of attention at least")
    f = Fields({**f.values, "rms_norm_eps": f.number("layer_norm_epsilon", 1e-5)}, f.where)
    return assemble(with_length(f, 4096), "nemotron_h", [blocks[kind] for kind in kinds])


def _kinds(f: Fields) -> list[str]:
    key = "layers_block_type" if f.items("layers_block_type") else "layer_types"
    pattern = f.values.get("hybrid_override_pattern")
    if not f.items(key) and pattern is not None:
        if not isinstance(pattern, str) or not pattern or set(pattern) - set(_LETTERS):
            raise f.wrong("hybrid_override_pattern", f"a text of the letters {' '.join(_LETTERS)}")
        return [_LETTERS[letter] for letter in pattern]
    default = ["linear_attention", "moe", "full_attention", "mlp"]
    return layer_kinds(f, len(f.items(key) or default), default, set(_LETTERS.values()))


def _mamba(f: Fields) -> RecurrentSpec:
    return scan_of(
        f, f.integer("mamba_num_heads", 128), f.integer("mamba_head_dim", 64), ("n_groups", f.integer("n_groups", 8)),
        ("ssm_state_size", f.integer("ssm_state_size", 128)), f.integer("conv_kernel", 4, minimum=2),
        conv_bias=f.flag("use_conv_bias", True), bias=f.flag("use_bias", False), norm="gate_first",
        limits=(f.number("time_step_min", 0.001, positive=False), math.inf),
    )  # fmt: skip


def _experts(f: Fields) -> MlpSpec:
    moe = MoeSpec(
        num_experts=f.integer("n_routed_experts", 8),
        top_k=f.integer("num_experts_per_tok", 2),
        intermediate_size=f.integer("moe_intermediate_size", 7688),
        scoring="sigmoid",
        normalize_topk=f.flag("norm_topk_prob", True),
        routed_scale=f.number("routed_scaling_factor", 1.0),
        correction_bias=True,
        num_groups=f.integer("n_group", 1),
        topk_groups=f.integer("topk_group", 1),
        group_score="top2_sum",
        shared_intermediate_size=f.integer("moe_shared_expert_intermediate_size", 7688),
        latent_size=f.optional_integer("moe_latent_size", minimum=1) or 0,
    )
    count, groups = moe.num_experts, moe.num_groups
    if count % groups or count < 2 * groups or moe.topk_groups > groups:
        raise f.wrong("n_group", f"a divisor of half of n_routed_experts = {count}, at least topk_group")
    if moe.top_k > count * moe.topk_groups // groups:
        raise f.wrong("num_experts_per_tok", "at most the experts of topk_group groups")
    return MlpSpec(moe.intermediate_size, "relu2", moe=moe)


def _rules(spec: ModelSpec, index: int, prefix: str) -> dict[str, tuple[Take, ...]]:
    takes, moe = mamba_takes(spec, index, f"{prefix}mixer."), spec.layers[index].mlp.moe
    if moe is None:
        return takes
    size, folder = moe.latent_size or spec.hidden_size, f"{prefix}mixer.experts."
    for part, one in (("up", (moe.intermediate_size, size)), ("down", (size, moe.intermediate_size))):
        names = tuple(f"{folder}{expert}.{part}_proj.weight" for expert in range(moe.num_experts))
        stacked = Take((f"{folder}{part}_proj",), (moe.num_experts, *one))
        takes[f"moe.{part}.weight"] = (Take(names, one, stacked=True), stacked)
    return takes


def weights(spec: ModelSpec) -> WeightMap:
    """Ignore layers for multi-token prediction. transformers 5 may write ``model.`` where the hub has ``backbone.``."""
    names = build_map(spec, _NAMES, _rules, (r"mtp\..*",), top=_TOP, layer_prefix="backbone.layers.{}.")

    def renamed(take: Take) -> Take:
        return replace(take, names=tuple(name.replace("backbone.", "model.", 1) for name in take.names))

    sources = {name: (*takes, *map(renamed, takes)) for name, takes in names.sources.items()}
    return replace(names, sources=sources, keys=_KEYS)


NEMOTRON_H = Family("nemotron_h", read_nemotron_h, weights)
