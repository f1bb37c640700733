"""Falcon-H1 (TII 2025, arXiv:2507.22448): attention and Mamba-2 in parallel, a factor on nearly every product."""

from __future__ import annotations

from dataclasses import replace

from quire.families.mamba import KEYS, Norm, is_on, mamba_names, mamba_of, mamba_takes, with_length
from quire.families.rope import rope_from_config
from quire.families.shape import Fields, activation, assemble, attention, head_dim_of
from quire.families.weights import LLAMA_NAMES, TOP_NAMES, Family, Take, WeightMap, build_map
from quire.modelspec import LayerSpec, MlpSpec, ModelSpec
from quire.recurrent_spec import RecurrentSpec

_NAMES = {
    **LLAMA_NAMES,
    **mamba_names("mamba"),
    "mlp_norm.weight": "pre_ff_layernorm.weight",
    **{
        f"mlp.{n}.{kind}": f"feed_forward.{n}_proj.{kind}"
        for n in ("gate", "up", "down")
        for kind in ("weight", "bias")
    },
}
_TOP = {**TOP_NAMES, "norm.weight": "model.final_layernorm.weight"}
_KEYS = (
    (r"feed_forward\.\w+\.bias", ("mlp_bias",)),
    (r"feed_forward\.\w+\.weight", ("intermediate_size", "hidden_size")),
    *KEYS,
)


def read_falcon_h1(f: Fields) -> ModelSpec:
    f = Fields(
        {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, **f.values}, f.where
    )
    f.refuse(
        "attention_bias", unless=(False,), why="the factors of this family are on products without a bias"
    )
    head_dim, into = head_dim_of(f), _factor(f, "attention_in_multiplier")
    # Rotation, q and k are linear, so factors on them are one on the scores; v's is one on the output.
    scale = head_dim**-0.5 * into * into * _factor(f, "key_multiplier")
    attn = attention(f, rope=rope_from_config(f, head_dim), head_dim=head_dim, scale=scale)
    factors = f.numbers("mlp_multipliers", 2) if f.has("mlp_multipliers") else (1.0, 1.0)
    mlp = MlpSpec(
        f.integer("intermediate_size", 14_336),
        activation(f),
        f.flag("mlp_bias", False),
        scales=(factors[0], factors[1]),
    )
    scales = into * _factor(f, "attention_out_multiplier"), _factor(f, "ssm_out_multiplier")
    layer = LayerSpec(attn, mlp, recurrent=_mamba(f), scales=scales)
    return assemble(
        with_length(f, 8192), "falcon_h1", [layer] * f.integer("num_hidden_layers", 32), eps=1e-5,
        embedding_scale=_factor(f, "embedding_multiplier"), logits_scale=_factor(f, "lm_head_multiplier"),
    )  # fmt: skip


def _factor(f: Fields, key: str) -> float:
    return f.number(key, 1.0, positive=False)


def _mamba(f: Fields) -> RecurrentSpec:
    norm: Norm = "none"
    if f.flag("mamba_rms_norm", False):
        norm = "norm_first" if is_on(f, "mamba_norm_before_gate") else "gate_first"
    width = f.optional_integer("mamba_d_ssm", minimum=1) if "mamba_d_ssm" in f.values else 1024
    into = _factor(f, "ssm_in_multiplier")
    rows = f.numbers("ssm_multipliers", 5) if f.has("ssm_multipliers") else (1.0,) * 5
    mamba = mamba_of(
        f, f.integer("hidden_size"), norm, width=width, scales=[into * factor for factor in rows]
    )
    if f.flag("projectors_bias", False) != mamba.bias:
        raise f.wrong(
            "projectors_bias", f"equal to mamba_proj_bias = {str(mamba.bias).lower()}: both or none"
        )
    if mamba.bias and into != 1.0:
        raise f.wrong("mamba_proj_bias", "false where ssm_in_multiplier is not 1")
    return mamba


def _rules(spec: ModelSpec, index: int, prefix: str) -> dict[str, tuple[Take, ...]]:
    return mamba_takes(spec, index, f"{prefix}mamba.")


def weights(spec: ModelSpec) -> WeightMap:
    return replace(build_map(spec, _NAMES, _rules, top=_TOP), keys=_KEYS)


FALCON_H1 = Family("falcon_h1", read_falcon_h1, weights)
