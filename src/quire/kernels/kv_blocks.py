"""Blocks of the KV cache: how one layer's keys and values lie in them (docs/kernels.md), and moves of whole blocks.

    storage  [num_blocks, block_elements]          one row per block, shared by all groups
    block    [layer slot 0 | layer slot 1 | …]     `KvLayout.layers_per_block` slots
    slot     [kv head 0 | kv head 1 | …]           one contiguous piece per kv head
    piece    rows:   [K: block_size × head_dim | V: block_size × v_head_dim]
             8 bits: [… | scales of K: block_size fp32 | scales of V: block_size fp32], one per position
             tiles:  [tile | tile | …], one for every 16 positions
    tile     [K: head_dim / 2 × 16 × 2 | V: 8 × v_head_dim × 2], or with codes of 8 or 4 bits as `kernels.kv_codes` says

The dot units of the native kernels read a tile as it lies: pairs of the dim for q·k, pairs of positions for p·V. Rows
are for everything else: torch, fp32, blocks whose size is no multiple of 16. With ``v_in_k`` (MLA, rows) there is no V
part: V is the first v_head_dim elements of each key. Rows and tiles take the same bytes. On a CPU int8 and int4 are
always in tiles. A GPU has int8 and fp8 in rows: an element is round(x / scale), and scale = largest magnitude / 127 of
the K or V of one position and head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from quire.parallel.stripe import Stripe

if TYPE_CHECKING:
    from quire.kernels.kv_codes import KvCodes

Layout = Literal["rows", "tiles"]
TILE = 16  # positions
SCALE_BYTES = 8  # per position and head in 8 bits: one fp32 for K, one for V


@dataclass(frozen=True, slots=True)
class KvView:
    """One layer of the cache. ``pieces [num_blocks, num_kv_heads, piece_elements]`` is a view of the storage.

    ``stripe``: the positions of a sequence that lie here; None: all. ``codes``: of tiles in 8 or 4 bits.
    """

    pieces: Tensor
    block_size: int
    head_dim: int
    v_head_dim: int
    v_in_k: bool = False
    layout: Layout = "rows"
    stripe: Stripe | None = None
    codes: KvCodes | None = None

    @property
    def num_kv_heads(self) -> int:
        return self.pieces.shape[1]

    @property
    def scaled(self) -> bool:
        """Whether K and V have 8 bits, with a scale for each position and head."""
        return self.pieces.dtype.itemsize == 1

    def native_codes(self, which: int) -> tuple[int, int, int]:
        """Return the bits of K and V, 16 without codes, and where the factors of keys (0) or queries (1) lie."""
        return (16, 16, 0) if self.codes is None else self.codes.native(which)

    @property
    def keys(self) -> Tensor:
        """View ``[num_blocks, num_kv_heads, block_size, head_dim]`` of rows."""
        assert self.layout == "rows"
        return torch.unflatten(
            self.pieces[..., : self.block_size * self.head_dim], -1, (self.block_size, self.head_dim)
        )

    @property
    def values(self) -> Tensor:
        """View ``[num_blocks, num_kv_heads, block_size, v_head_dim]`` of rows."""
        assert self.layout == "rows"
        if self.v_in_k:
            return self.keys[..., : self.v_head_dim]
        start = self.block_size * self.head_dim
        end = start + self.block_size * self.v_head_dim
        return torch.unflatten(self.pieces[..., start:end], -1, (self.block_size, self.v_head_dim))

    def read(self, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Copy blocks out of any layout: K and V ``[len(block_ids), num_kv_heads, block_size, dim]``, codes as fp32."""
        pieces = _gather(self.pieces, block_ids)
        picked = KvView(pieces, self.block_size, self.head_dim, self.v_head_dim, self.v_in_k, self.layout)
        if self.layout == "rows":
            if not self.scaled:
                return picked.keys, picked.values
            scales = picked._row_scales().unsqueeze(-1)
            return picked.keys.float() * scales[:, :, 0], picked.values.float() * scales[:, :, 1]
        if self.codes is not None:
            return self.codes.read(picked._split(), self.head_dim, self.v_head_dim)
        keys, values = picked._tiles()
        shape = (*pieces.shape[:2], self.block_size)
        return keys.transpose(3, 4).reshape(*shape, -1), values.transpose(4, 5).reshape(*shape, -1)

    def write(self, k: Tensor, v: Tensor | None, block_ids: Tensor, offsets: Tensor) -> None:
        """Write row i of ``k`` and ``v [n, num_kv_heads, dim]`` at position ``offsets[i]`` of ``block_ids[i]``.

        Rows with a negative block are not written: their positions lie in another rank's cache.
        """
        if self.stripe is not None:
            here = block_ids >= 0
            k, v = k[here], None if v is None else v[here]
            block_ids, offsets = block_ids[here], offsets[here]
        dtype = self.pieces.dtype
        if self.layout == "rows" and self.scaled:
            assert v is not None
            self._write_scaled_rows(k, v, block_ids, offsets)
        elif self.layout == "rows":
            self.keys[block_ids, :, offsets] = k.to(dtype)
            if v is not None:
                self.values[block_ids, :, offsets] = v.to(dtype)
        elif self.codes is not None:
            assert v is not None
            self.codes.write(self._split(), k, v, block_ids, offsets)
        else:
            assert v is not None
            self._write_tiles(k, v, block_ids, offsets)

    def _write_scaled_rows(self, k: Tensor, v: Tensor, block_ids: Tensor, offsets: Tensor) -> None:
        dtype = self.pieces.dtype
        (k, k_scale), (v, v_scale) = _to_8_bits(k, dtype), _to_8_bits(v, dtype)
        self._row_scales()[block_ids, :, :, offsets] = torch.stack((k_scale, v_scale), dim=-1)
        # As bits, because torch cannot scatter fp8.
        self.keys.view(torch.int8)[block_ids, :, offsets] = k.to(dtype).view(torch.int8)
        self.values.view(torch.int8)[block_ids, :, offsets] = v.to(dtype).view(torch.int8)

    def _write_tiles(self, k: Tensor, v: Tensor, block_ids: Tensor, offsets: Tensor) -> None:
        dtype = self.pieces.dtype
        tile, place = offsets // TILE, offsets % TILE
        keys, values = self._tiles()
        # Writing the first position of a tile clears the tile: another sequence may have left inf or NaN there.
        fresh = place == 0
        keys[block_ids[fresh], :, tile[fresh]] = 0
        values[block_ids[fresh], :, tile[fresh]] = 0
        keys[block_ids, :, tile, :, place] = torch.unflatten(k.to(dtype), -1, (-1, 2))
        values[block_ids, :, tile, place // 2, :, place % 2] = v.to(dtype)

    def _tiles(self) -> tuple[Tensor, Tensor]:
        """Views K ``[num_blocks, num_kv_heads, tiles, head_dim / 2, 16, 2]``, V ``[…, tiles, 8, v_head_dim, 2]``."""
        tiles, k_size = self._split(), TILE * self.head_dim
        keys, values = tiles[..., :k_size], tiles[..., k_size:]
        return torch.unflatten(keys, -1, (-1, TILE, 2)), torch.unflatten(values, -1, (TILE // 2, -1, 2))

    def _split(self) -> Tensor:
        """View ``[num_blocks, num_kv_heads, tiles, elements of a tile]``."""
        assert self.layout == "tiles"
        return torch.unflatten(self.pieces, -1, (self.block_size // TILE, -1))

    def _row_scales(self) -> Tensor:
        """View ``[num_blocks, num_kv_heads, 2, block_size]`` of 8-bit rows: fp32 scales of K, of V."""
        scales = self.pieces[..., -SCALE_BYTES * self.block_size :].view(torch.float32)
        return torch.unflatten(scales, -1, (2, self.block_size))


def _to_8_bits(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x [n, heads, dim]`` → the same in −127 … 127 (whole numbers) or −448 … 448, and scales ``[n, heads]``."""
    limit = 127.0 if dtype == torch.int8 else 448.0
    most = x.float().abs().amax(-1)
    # Not `limit / most`: torch computes that as a reciprocal and a product.
    inverse = torch.where(most > 0, torch.full_like(most, limit) / most, 0.0)
    scaled = x.float() * inverse.unsqueeze(-1)
    return (scaled.round() if dtype == torch.int8 else scaled.clamp(-limit, limit)), most / limit


def can_tile(dtype: torch.dtype, block_size: int, head_dim: int, *, v_in_k: bool) -> bool:
    """Whether a cache can lie in tiles: bf16 or int8, whole tiles per block, an even head_dim, a V of its own."""
    return (
        dtype in (torch.bfloat16, torch.int8) and block_size % TILE == 0 and head_dim % 2 == 0 and not v_in_k
    )


def _gather(rows: Tensor, index: Tensor) -> Tensor:
    """``rows.index_select(0, index)``, four bytes at a time: torch gathers bf16 five times slower."""
    sizes = (*rows.stride()[:-1], rows.shape[-1], rows.storage_offset())
    if rows.dtype.itemsize == 2 and all(size % 2 == 0 for size in sizes):
        return rows.view(torch.float32).index_select(0, index).view(rows.dtype)
    return rows.index_select(0, index)


def view_layer(
    storage: Tensor, slot: int, *, num_kv_heads: int, block_size: int, head_dim: int, v_head_dim: int,
    v_in_k: bool = False, layout: Layout = "rows", stripe: Stripe | None = None, codes: KvCodes | None = None,
) -> KvView:  # fmt: skip
    """Return the view of layer slot ``slot`` over ``storage [num_blocks, block_elements]``; int8 tiles have codes."""
    assert (codes is not None) == (layout == "tiles" and storage.dtype == torch.int8)
    assert layout == "rows" or can_tile(storage.dtype, block_size, head_dim, v_in_k=v_in_k)
    piece = block_size * (head_dim if v_in_k else head_dim + v_head_dim)
    if codes is not None:
        piece = block_size // TILE * codes.tile_bytes(head_dim, v_head_dim)
    elif storage.dtype.itemsize == 1:
        assert not v_in_k
        piece += block_size * SCALE_BYTES
    start = slot * num_kv_heads * piece
    assert start + num_kv_heads * piece <= storage.shape[1], "the layer slot lies beyond the block"
    pieces = torch.unflatten(storage[:, start : start + num_kv_heads * piece], 1, (num_kv_heads, piece))
    return KvView(pieces, block_size, head_dim, v_head_dim, v_in_k, layout, stripe, codes)


def copy_blocks(storage: Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """Copy blocks ``(source, target)`` of ``storage [num_blocks, block_elements]`` in list order, on any device.

    In order means that a later move may read a block that an earlier move wrote. Moves that do not touch what others
    before them wrote go together in one gather and one scatter.
    """
    pending: list[tuple[int, int]] = []
    written: set[int] = set()
    for source, target in moves:
        if source in written or target in written:
            _copy(storage, pending)
            pending, written = [], set()
        pending.append((source, target))
        written.add(target)
    _copy(storage, pending)


def _copy(storage: Tensor, moves: list[tuple[int, int]]) -> None:
    if storage.dtype.itemsize == 1:
        storage = storage.view(torch.int8)  # torch scatters no fp8
    if len(moves) == 1:
        storage[moves[0][1]].copy_(storage[moves[0][0]])
    elif moves:
        sources, targets = torch.tensor(moves, dtype=torch.int64).to(storage.device).unbind(1)
        storage.index_copy_(0, targets, storage.index_select(0, sources))


def clear_blocks(storage: Tensor, block_ids: Tensor) -> None:
    """Fill the blocks ``block_ids [n]`` int64 of ``storage [num_blocks, block_elements]`` with zeros."""
    if storage.dtype.itemsize == 1:
        storage = storage.view(torch.int8)  # torch fills no fp8
    storage.index_fill_(0, block_ids.to(storage.device), 0)
