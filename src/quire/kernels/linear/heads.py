"""A small matrix for every head (MLA), in the layout of the backend that multiplies with them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch

from quire.kernels.linear import native, reference
from quire.kernels.linear.packed import PackedLinear
from quire.kernels.registry import NATIVE_LEVELS, Backend, register
from quire.kernels.threads import one_torch_thread
from quire.kernels.workspace import empty

try:
    from quire import _native
except ImportError:  # no compiler at install
    _native = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class HeadMatrices:
    """``data`` is opaque but to the backend."""

    num_heads: int
    in_size: int
    out_size: int
    data: torch.Tensor | list[PackedLinear]
    backend: Backend


def pack_reference(weight: torch.Tensor) -> torch.Tensor:
    """``[num_heads, in_size, out_size]`` → the same, both sizes padded with zeros to a multiple of 32."""
    heads, in_size, out_size = weight.shape
    align = reference.ALIGN
    packed = weight.new_zeros(heads, reference.round_up(in_size, align), reference.round_up(out_size, align))
    packed[:, :in_size, :out_size] = weight
    return packed


def multiply_reference(x: torch.Tensor, heads: HeadMatrices, out: torch.Tensor) -> None:
    """One bmm for every 32 tokens."""
    assert isinstance(heads.data, torch.Tensor)
    num_tokens, num_heads, in_size = x.shape
    tile = reference.TILE_ROWS
    tiles = x.new_zeros(num_heads, reference.round_up(num_tokens, tile), heads.data.shape[1])
    tiles[:, :num_tokens, :in_size] = x.transpose(0, 1)
    for start in range(0, num_tokens, tile):
        with one_torch_thread():
            product = torch.bmm(tiles[:, start : start + tile], heads.data)
        out[start : start + tile] = product[:, : num_tokens - start, : heads.out_size].transpose(0, 1)


def pack_native(module: ModuleType, weight: torch.Tensor) -> list[PackedLinear]:
    """A packed matrix for each head of ``[num_heads, in_size, out_size]``."""
    _, in_size, out_size = weight.shape
    matrices = []
    for matrix in weight:
        packed = native.pack_empty(out_size, in_size, weight.dtype)
        native.write_rows(module, packed, 0, matrix.transpose(0, 1).contiguous())
        matrices.append(packed)
    return matrices


def multiply_native(
    module: ModuleType, isa: str, x: torch.Tensor, heads: HeadMatrices, out: torch.Tensor
) -> None:
    """The native linear for each head, reading and writing its part of the rows."""
    assert isinstance(heads.data, list)
    for head, packed in enumerate(heads.data):
        native.linear(module, isa, x[:, head], packed, x.dtype, out[:, head])


def empty_heads(x: torch.Tensor, out_size: int) -> torch.Tensor:
    """Room for a result."""
    return empty(max(x.shape[0], 1), x.shape[1], out_size, dtype=x.dtype, device=x.device)[: x.shape[0]]


register("head_linear.pack", "reference")(pack_reference)
register("head_linear", "reference")(multiply_reference)
if _native is not None:
    for level in NATIVE_LEVELS:
        if _native.has_isa(level):
            register("head_linear.pack", level)(partial(pack_native, _native))
            register("head_linear", level)(partial(multiply_native, _native, level))
