"""Weights that AutoAWQ, GPTQ and compressed-tensors pack into int32 words → the exchange form.

A word holds 32 / bits unsigned numbers, lowest bits first (AWQ in an order of its own). Zero points are packed alike.

    compressed-tensors   words along the inputs [out, in / 8], zero points along the outputs [out / 8, groups]
    gptq                 words along the inputs [in / 8, out], zero points along the outputs [groups, out / 8]
    awq                  words along the outputs [in, out / 8], zero points the same [groups, out / 8]

Sources: AutoGPTQ's ``QuantLinear.pack``, AutoAWQ's ``WQLinear_GEMM``, compressed-tensors' ``pack_quantized``.
"""

from __future__ import annotations

import torch

from quire.kernels.linear.packed import QuantizedWeight
from quire.quant.stored import regroup
from quire.weight_format import Kind, WeightFormat

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place in the word of the outputs 8i, 8i + 1, …


def unpack(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """``[rows, n]`` int32 → ``[rows, n · 32 / bits]`` uint8."""
    count = 32 // bits
    places = torch.tensor(order or range(count), dtype=torch.int32) * bits
    return (words.unsqueeze(-1) >> places & (1 << bits) - 1).flatten(1).to(torch.uint8)


def exchange(
    q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, bits: int, held: WeightFormat
) -> QuantizedWeight:
    """Unsigned ``q [out, in]``, ``scale`` and ``zero [out, groups]`` (None: the middle) → ``held``.

    w = scale · (q − zero), and with q′ = q − middle: scale · q′ + scale · (middle − zero).
    """
    middle = 1 << bits - 1
    signed = (q.to(torch.int16) - middle).to(torch.int8)
    scale = scale.float()
    offset = None
    if zero is not None:
        offset = scale * (middle - zero.float())
    elif held.has_offset:
        offset = torch.zeros_like(scale)
    kind: Kind = "int4" if bits == 4 else "int8"
    group = None if scale.shape[1] == 1 else q.shape[1] // scale.shape[1]
    stored = QuantizedWeight(WeightFormat(kind, group, held.has_offset), signed, scale, offset)
    return regroup(stored, held)
