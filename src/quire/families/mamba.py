"""What families with Mamba-2 share: the sizes of its scan, the takes of its weights, and the names of layer types."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from quire.families.shape import Fields, activation
from quire.families.weights import Take
from quire.modelspec import ModelSpec
from quire.recurrent_spec import MambaSpec, RecurrentSpec

Norm = Literal["none", "gate_first", "norm_first"]
_VECTORS = {"rate": "A_log", "dt_bias": "dt_bias", "skip": "D", "norm.weight": "norm.weight"}
# Keys that name the type of each layer, and the sizes that decide about a scan's tensors.
KIND_KEYS = ("layer_types", "layers_block_type", "hybrid_override_pattern")
_SIZE_KEYS = (
    "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_d_ssm",
    "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel",
)  # fmt: skip
# Which keys decide about tensors, beside those of other families.
KEYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"(mamba|mixer)\.conv1d\.bias", ("mamba_conv_bias", "use_conv_bias", *KIND_KEYS)),
    (r"(mamba|mixer)\.(in|out)_proj\.bias", ("mamba_proj_bias", "projectors_bias", "use_bias", *KIND_KEYS)),
    (r"(mamba|mixer)\.(in_proj|out_proj|conv1d|A_log|D|dt_bias|norm)\b.*",
     ("mamba_rms_norm", *_SIZE_KEYS, "hidden_size", *KIND_KEYS)),
    (r"self_attn\..*", ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", *KIND_KEYS)),
)  # fmt: skip
_OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


def mamba_names(folder: str) -> dict[str, str]:
    """Return canonical name → name in the checkpoint, where the layer's weights are in ``folder``."""
    names = {f"mamba.{name}": f"{folder}.{stored}" for name, stored in _VECTORS.items()}
    return names | {f"mamba.o.{kind}": f"{folder}.out_proj.{kind}" for kind in ("weight", "bias")}


def layer_kinds(f: Fields, count: int, default: Sequence[str], allowed: set[str]) -> list[str]:
    """Return the type of each layer under the name that transformers 5 has for it."""
    key = "layers_block_type" if f.items("layers_block_type") else "layer_types"
    kinds = [_OLD_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in f.items(key)]
    kinds = kinds or list(default)
    if len(kinds) != count or not all(isinstance(kind, str) and kind in allowed for kind in kinds):
        names = " or ".join(repr(name) for name in sorted(allowed))
        raise f.wrong(key, f"a list of num_hidden_layers = {count} entries {names}")
    return kinds


def mamba_of(
    f: Fields, hidden: int, norm: Norm, *, width: int | None = None, scales: Sequence[float] = (1.0,) * 5
) -> RecurrentSpec:
    """Return the scan as Granite 4 and Falcon-H1 write it; ``width``: of all its heads."""
    if activation(f) != "silu":
        raise f.wrong("hidden_act", "'silu', which the convolution of this family has")
    heads = f.integer("mamba_n_heads", 128)
    source = "mamba_d_ssm" if width else "mamba_expand · hidden_size"
    width = width or f.integer("mamba_expand", 2) * hidden
    is_auto = f.values.get("mamba_d_head") in (None, "auto")
    head_dim = width // heads if is_auto else f.integer("mamba_d_head")
    if heads * head_dim != width:
        raise f.wrong(
            "mamba_d_head", f"such that mamba_n_heads = {heads} have the {width} columns of {source}"
        )
    return scan_of(
        f, heads, head_dim, ("mamba_n_groups", f.integer("mamba_n_groups", 1)),
        ("mamba_d_state", f.integer("mamba_d_state", 256)), f.integer("mamba_d_conv", 4, minimum=2),
        conv_bias=is_on(f, "mamba_conv_bias"), bias=f.flag("mamba_proj_bias", False), norm=norm, limits=_limits(f),
        scales=scales,
    )  # fmt: skip


def is_on(f: Fields, key: str) -> bool:
    """Read a flag that is on where it is absent, and off where it is null, as transformers has it."""
    return f.flag(key, key not in f.values)


def scan_of(
    f: Fields, heads: int, head_dim: int, groups: tuple[str, int], state: tuple[str, int], taps: int, *,
    conv_bias: bool, bias: bool, norm: Norm, limits: tuple[float, float], scales: Sequence[float] = (1.0,) * 5,
) -> RecurrentSpec:  # fmt: skip
    """``groups``, ``state``: the key that says so, and the number of groups of B and C, and of a head's channels."""
    if heads % groups[1]:
        raise f.wrong(groups[0], f"a divisor of the {heads} heads")
    if state[1] % 4:
        raise f.wrong(state[0], "a multiple of 4")
    z, x, b, c, dt = scales
    mamba = MambaSpec(norm, limits, (z, x, b, c, dt))
    channels = heads * head_dim + 2 * groups[1] * state[1]
    return RecurrentSpec(
        "mamba2", groups[1], heads, state[1], head_dim, taps, channels, conv_bias, bias, mamba
    )


def _limits(f: Fields) -> tuple[float, float]:
    """Return the limits of a step's size; transformers writes infinity as an object."""
    infinity = ({"__float__": "Infinity"}, "Infinity")
    limits = [
        math.inf if limit in infinity else limit for limit in f.items("time_step_limit") or (0.0, math.inf)
    ]
    is_number = [isinstance(limit, int | float) and not isinstance(limit, bool) for limit in limits]
    if is_number != [True, True] or not 0 <= limits[0] <= limits[1]:
        raise f.wrong("time_step_limit", "two numbers ≥ 0, the least and the greatest")
    return float(limits[0]), float(limits[1])


def mamba_takes(spec: ModelSpec, index: int, folder: str) -> dict[str, tuple[Take, ...]]:
    """Return takes of a scan's input projections, which lie one after the other: z, x, B, C, dt."""
    r = spec.layers[index].recurrent
    if r is None:
        return {}
    takes: dict[str, tuple[Take, ...]] = {}
    widths = {"z": r.v_width, "x": r.v_width, "b": r.k_width, "c": r.k_width, "dt": r.num_v_heads}
    total, start = sum(widths.values()), 0
    for part, width in widths.items():
        for kind, shape in (("weight", (total, spec.hidden_size)), ("bias", (total,))):
            take = Take((f"{folder}in_proj.{kind}",), shape, start=start, stop=start + width)
            takes[f"mamba.{part}.{kind}"] = (take,)
        start += width
    start, taps = 0, (r.conv_channels, 1, r.conv_kernel)
    for part in ("x", "b", "c"):
        stop = start + widths[part]
        weight = Take((f"{folder}conv1d.weight",), taps, start=start, stop=stop, encoding="taps")
        takes[f"mamba.conv_{part}.weight"] = (weight,)
        takes[f"mamba.conv_{part}.bias"] = (
            Take((f"{folder}conv1d.bias",), taps[:1], start=start, stop=stop),
        )
        start = stop
    takes["mamba.rate"] = (Take((f"{folder}A_log",), (r.num_v_heads,), encoding="rate"),)
    return takes


def with_length(f: Fields, default: int) -> Fields:
    """Return the fields with ``max_position_embeddings``, which the family has a default for."""
    return Fields(
        {**f.values, "max_position_embeddings": f.integer("max_position_embeddings", default)}, f.where
    )
