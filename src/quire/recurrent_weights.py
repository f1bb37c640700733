"""Canonical names and shapes of the weights of a recurrent layer (`RecurrentSpec`), after ``layers.{i}.``.

``rate`` is −exp(A_log); value head h reads key head ``h // (num_v_heads / num_k_heads)``.

"gated_delta" (Yang et al. 2024, arXiv:2412.06464; Qwen3-Next and Qwen3.5):

    delta.{q,k}.weight [num_k_heads · k_head_dim, hidden]     delta.{v,z}.weight [num_v_heads · v_head_dim, hidden]
    delta.{a,b}.weight [num_v_heads, hidden]                  delta.{rate,dt_bias} [num_v_heads]
    delta.conv_{q,k,v}.weight [rows of q, k or v, conv_kernel]
    delta.norm.weight [v_head_dim]                            delta.o.weight [hidden, num_v_heads · v_head_dim]

"channel_delta" (Kimi Team 2025, arXiv:2510.26692), the rule with a decay per channel of the key. f gives the decays
and z the gate of the output: one projection each, or two with ``gate.rank`` columns between them:

    kda.{q,k,f}.weight [heads · k_head_dim, hidden]           kda.{v,z}.weight [heads · v_head_dim, hidden]
    kda.{f,z}_a.weight [rank, hidden], {f,z}_b.weight [heads · k_head_dim or v_head_dim, rank], instead of f and z
    kda.b.weight [heads, hidden]    kda.rate [heads]          kda.dt_bias [heads · k_head_dim]
    kda.conv_{q,k,v}.weight, .norm.weight, .o.weight as above

"mamba2" (Dao and Gu 2024, arXiv:2405.21060), whose key heads are the groups of B and C; ``skip`` is D:

    mamba.{z,x}.weight [num_v_heads · v_head_dim, hidden]     mamba.{b,c}.weight [num_k_heads · k_head_dim, hidden]
    mamba.dt.weight [num_v_heads, hidden]                     mamba.{rate,dt_bias,skip} [num_v_heads]
    mamba.conv_{x,b,c}.{weight,bias} [rows of x, b or c, conv_kernel], [rows]
    mamba.norm.weight [num_v_heads · v_head_dim]              mamba.o.weight [hidden, num_v_heads · v_head_dim]

"short_conv" (LFM2), gates on both sides of a convolution, and no state but its past:

    conv.{b,c,x}.weight [conv_channels, hidden]               conv.taps.{weight,bias} [conv_channels, conv_kernel]
    conv.o.weight [hidden, conv_channels]

With ``bias`` the projections have biases, too. Torch-free.
"""

from __future__ import annotations

from quire.recurrent_spec import Kind, RecurrentSpec

_PREFIXES: dict[Kind, str] = {
    "gated_delta": "delta.",
    "channel_delta": "kda.",
    "mamba2": "mamba.",
    "short_conv": "conv.",
}
_VECTORS: dict[Kind, tuple[str, ...]] = {
    "gated_delta": ("rate", "dt_bias"),
    "channel_delta": ("rate",),
    "mamba2": ("rate", "dt_bias", "skip"),
    "short_conv": (),
}


def prefix_of(spec: RecurrentSpec) -> str:
    """Return what the names of its weights begin with."""
    return _PREFIXES[spec.kind]


def widths_of(spec: RecurrentSpec) -> dict[str, int]:
    """Return the rows of each projection that reads the layer's input, in the order in which they are stacked."""
    k, v, heads = spec.k_width, spec.v_width, spec.num_v_heads
    if spec.kind == "gated_delta":
        return {"q": k, "k": k, "v": v, "z": v, "b": heads, "a": heads}
    if spec.gate is not None:
        rank = spec.gate.rank
        return {
            "q": k,
            "k": k,
            "v": v,
            **({"z_a": rank, "f_a": rank} if rank else {"z": v, "f": k}),
            "b": heads,
        }
    if spec.kind == "mamba2":
        return {"z": v, "x": v, "b": k, "c": k, "dt": heads}
    return {"b": v, "c": v, "x": v}


def second_widths(spec: RecurrentSpec) -> dict[str, int]:
    """Return the rows of the projections that read one of ``gate.rank`` columns."""
    return {"f_b": spec.k_width, "z_b": spec.v_width} if spec.gate is not None and spec.gate.rank else {}


def conv_rows(spec: RecurrentSpec) -> dict[str, int]:
    """Return the channels of each part of the convolution, by its name, in the order in which they lie."""
    if spec.kind == "short_conv":
        return {"taps": spec.conv_channels}
    widths, parts = widths_of(spec), "xbc" if spec.kind == "mamba2" else "qkv"
    return {f"conv_{part}": widths[part] for part in parts}


def shapes_of(spec: RecurrentSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return name → shape of every weight, in a model of that hidden size."""
    widths, rows = widths_of(spec), conv_rows(spec)
    shapes: dict[str, tuple[int, ...]] = {f"{n}.weight": (width, hidden) for n, width in widths.items()}
    shapes |= {f"{n}.weight": (width, spec.conv_kernel) for n, width in rows.items()}
    shapes["o.weight"] = (hidden, spec.v_width)
    if spec.gate is not None:
        shapes |= {f"{n}.weight": (width, spec.gate.rank) for n, width in second_widths(spec).items()}
        shapes["dt_bias"] = (spec.k_width,)
    if spec.bias:
        shapes |= {f"{n}.bias": (width,) for n, width in (*widths.items(), ("o", hidden))}
    if spec.conv_bias:
        shapes |= {f"{n}.bias": (width,) for n, width in rows.items()}
    shapes |= dict.fromkeys(_VECTORS[spec.kind], (spec.num_v_heads,))
    if spec.kind in ("gated_delta", "channel_delta"):
        shapes["norm.weight"] = (spec.v_head_dim,)
    elif spec.mamba is not None and spec.mamba.norm != "none":
        shapes["norm.weight"] = (spec.v_width,)
    return {prefix_of(spec) + name: shape for name, shape in shapes.items()}
