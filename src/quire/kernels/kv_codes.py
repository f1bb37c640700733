"""K and V of the cache in codes of 8 or 4 bits: rotated heads in tiles (csrc/cpu/kv_codes.h).

A head of K or V is multiplied by a Hadamard matrix (`kernels.rotation`), which spreads an outlier over the head.
K is taken after RoPE, times its ``factors`` (`layers.key_balance`). Then, for one position and head:

    8 bits    x = scale · c                 c = −127 … 127, scale = largest magnitude / 127
    4 bits    x = scale · (low + step · q)  q = 0 … 15: the numbers of 8 bits once more, in groups of 32 of the head,
                                            with a step of 1 … 16 and a low of 8 bits, both integers

So 4 bits become 8 by integers alone, and both have the same products. All of it depends on one position alone: what
comes later changes no byte.

    tile    [K: head_dim / 2 × 16 × 2 | V: 8 × v_head_dim × 2 | scales of K: 16 fp32 | scales of V: 16 fp32]
    4 bits  K: head_dim / 2 × 16 bytes, an even element in the low half; V: 8 × v_head_dim bytes, an even position in
            the low half; and at the end of the tile groups × [steps: 16 | lows: 16] of K, of V
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.rotation import head_block, rotate_heads
from quire.kv_layout import CODE_GROUP, KV_CODE_BITS

TILE = 16  # positions


class Scaled(NamedTuple):
    """Codes in the order of a head ``[n, heads, dim]`` int8, scales ``[n, heads]``; 4 bits: steps and lows.

    ``groups [n, heads, groups, 2]`` int8.
    """

    codes: Tensor
    scales: Tensor
    groups: Tensor | None


@dataclass(frozen=True, slots=True)
class KvCodes:
    """How one layer's K and V are coded. ``factors`` fp32 ``[2, num_kv_heads, head_dim]``: of keys, and of queries."""

    k_bits: int
    v_bits: int
    factors: Tensor | None = None

    def tile_bytes(self, head_dim: int, v_head_dim: int) -> int:
        """Return the bytes of a tile of one head."""
        return self._starts(head_dim, v_head_dim)[-1]

    def native(self, which: int) -> tuple[int, int, int]:
        """As `KvView.native_codes`."""
        return self.k_bits, self.v_bits, 0 if self.factors is None else self.factors[which].data_ptr()

    def _starts(self, head_dim: int, v_head_dim: int) -> tuple[int, ...]:
        """Where the parts of a tile begin: V, scales, groups of K, groups of V, and the end."""
        v = TILE * head_dim * self.k_bits // 8
        scales = v + TILE * v_head_dim * self.v_bits // 8
        k_groups = scales + 2 * 4 * TILE
        v_groups = k_groups + _num_groups(head_dim, self.k_bits) * 2 * TILE
        return v, scales, k_groups, v_groups, v_groups + _num_groups(v_head_dim, self.v_bits) * 2 * TILE

    def write(self, tiles: Tensor, k: Tensor, v: Tensor, block_ids: Tensor, offsets: Tensor) -> None:
        """As `KvView.write`, into ``tiles [num_blocks, heads, tiles of a block, bytes]``."""
        tile, place = offsets // TILE, offsets % TILE
        fresh = place == 0
        tiles[block_ids[fresh], :, tile[fresh]] = 0
        parts = self._parts(tiles, k.shape[-1], v.shape[-1])
        keys = k.float() if self.factors is None else k.float() * self.factors[0]
        coded_k, coded_v = _coded(keys, self.k_bits), _coded(v.float(), self.v_bits)
        scales = torch.stack((coded_k.scales, coded_v.scales), dim=-1)
        parts.scales.view(torch.float32)[block_ids, :, tile, :, place] = scales
        if self.k_bits == 8:
            parts.k[block_ids, :, tile, :, place] = torch.unflatten(coded_k.codes, -1, (-1, 2))
        else:
            pairs = torch.unflatten(coded_k.codes, -1, (-1, 2))
            parts.k[block_ids, :, tile, :, place] = pairs[..., 0] | pairs[..., 1] << 4
        if self.v_bits == 8:
            parts.v[block_ids, :, tile, place // 2, :, place % 2] = coded_v.codes
        else:
            for odd, other in ((0, -16), (1, 15)):  # the half of a byte that stays
                here = place % 2 == odd
                at = block_ids[here], tile[here], place[here] // 2
                stays = parts.v[at[0], :, at[1], at[2]] & other
                parts.v[at[0], :, at[1], at[2]] = stays | coded_v.codes[here] << 4 * odd
        for groups, coded in ((parts.k_groups, coded_k), (parts.v_groups, coded_v)):
            if coded.groups is not None:
                groups[block_ids, :, tile, :, :, place] = coded.groups

    def read(self, tiles: Tensor, head_dim: int, v_head_dim: int) -> tuple[Tensor, Tensor]:
        """``tiles [blocks, heads, tiles of a block, bytes]`` → K and V fp32 ``[blocks, heads, block_size, dim]``."""
        parts = self._parts(tiles, head_dim, v_head_dim)
        k, v = parts.k, parts.v
        if self.k_bits == 4:
            groups = parts.k_groups.repeat_interleave(CODE_GROUP // 2, dim=3)[:, :, :, : head_dim // 2]
            k = _bytes_of(k, groups[..., 0, :].unsqueeze(-1), groups[..., 1, :].unsqueeze(-1))
        if self.v_bits == 4:
            groups = parts.v_groups.repeat_interleave(CODE_GROUP, dim=3)[:, :, :, :v_head_dim]
            pairs = torch.unflatten(groups, -1, (-1, 2)).permute(4, 0, 1, 2, 5, 3, 6)
            v = _bytes_of(v, pairs[0], pairs[1])
        shape = (*tiles.shape[:2], tiles.shape[2] * TILE)
        scales = parts.scales.view(torch.float32).transpose(2, 3).reshape(*shape[:2], 2, -1, 1)
        keys = k.float().transpose(3, 4).reshape(*shape, -1) * scales[:, :, 0]
        values = v.float().transpose(4, 5).reshape(*shape, -1) * scales[:, :, 1]
        keys = rotate_heads(keys) / head_block(head_dim)
        if self.factors is not None:
            keys = keys * self.factors[1].unsqueeze(1)
        return keys, rotate_heads(values) / head_block(v_head_dim)

    def _parts(self, tiles: Tensor, head_dim: int, v_head_dim: int) -> Parts:
        v, scales, k_groups, v_groups, end = self._starts(head_dim, v_head_dim)
        assert tiles.shape[-1] == end, (tiles.shape, end)
        pairs = (2,) if self.k_bits == 8 else ()
        positions = (2,) if self.v_bits == 8 else ()
        return Parts(
            torch.unflatten(tiles[..., :v], -1, (-1, TILE, *pairs)),
            torch.unflatten(tiles[..., v:scales], -1, (TILE // 2, -1, *positions)),
            torch.unflatten(tiles[..., scales:k_groups], -1, (2, 4 * TILE)),
            torch.unflatten(tiles[..., k_groups:v_groups], -1, (-1, 2, TILE)),
            torch.unflatten(tiles[..., v_groups:], -1, (-1, 2, TILE)),
        )


def by_layer(dtype: str, factors: Mapping[int, Tensor]) -> Callable[[int], KvCodes]:
    """Return the codes of a cache of ``dtype`` by the number of a layer; ``factors``: of layers that have some."""
    return lambda layer: KvCodes(*KV_CODE_BITS[dtype], factors.get(layer))


class Parts(NamedTuple):
    """Views of tiles ``[blocks, heads, tiles, …]``."""

    k: Tensor  # [head_dim / 2, 16, 2], 4 bits: [head_dim / 2, 16]
    v: Tensor  # [8, v_head_dim, 2], 4 bits: [8, v_head_dim]
    scales: Tensor  # [2, 64] bytes
    k_groups: Tensor  # [groups, 2, 16]
    v_groups: Tensor  # [groups, 2, 16]


def _num_groups(dim: int, bits: int) -> int:
    return -(-dim // CODE_GROUP) if bits == 4 else 0


def _coded(x: Tensor, bits: int) -> Scaled:
    """``x [n, heads, dim]`` fp32, which is rotated here."""
    x = rotate_heads(x)
    most = x.abs().amax(-1)
    # Not `127 / most`: torch computes that as a reciprocal and a product.
    inverse = torch.where(most > 0, torch.full_like(most, 127.0) / most, 0.0)
    scaled = x * inverse.unsqueeze(-1)
    if bits == 8:
        return Scaled(scaled.round().to(torch.int8), most / 127.0, None)
    codes, groups = torch.empty(x.shape, dtype=torch.int8), []
    for begin in range(0, x.shape[-1], CODE_GROUP):
        group = scaled[..., begin : begin + CODE_GROUP]
        least, largest = group.amin(-1), group.amax(-1)
        # Sixteen steps reach over the group, so that its ends are half a step from a code.
        step = ((largest - least) * 0.0625).ceil().clamp_min(1.0)
        low = ((least + largest) * 0.5 - 7.5 * step).round()
        low = torch.minimum(low.clamp_min(-128.0), 127.0 - 15.0 * step)
        q = ((group - low.unsqueeze(-1)) / step.unsqueeze(-1) + 0.5).floor().clamp(0.0, 15.0)
        codes[..., begin : begin + CODE_GROUP] = q.to(torch.int8)
        groups.append(torch.stack((step, low), dim=-1).to(torch.int8))
    return Scaled(codes, most / 127.0, torch.stack(groups, dim=-2))


def _bytes_of(codes: Tensor, steps: Tensor, lows: Tensor) -> Tensor:
    """Bytes of two codes of 4 bits ``[...]``, and what broadcasts to ``[..., 2]`` → codes of 8 bits ``[..., 2]``."""
    return torch.stack((codes & 15, codes >> 4 & 15), dim=-1) * steps + lows
