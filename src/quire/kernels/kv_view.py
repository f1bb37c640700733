"""How one layer's keys and values lie in the pages of the cache (docs/kernels.md).

    storage  [num_blocks, page_elements]           one row a page, shared by all groups
    page     [layer slot 0 | layer slot 1 | …]     `KvLayout.layers_per_page` slots
    slot     [kv head 0 | kv head 1 | …]           one contiguous piece a kv head
    piece    [K: block_size × head_dim | V: block_size × v_head_dim]

The inside of a piece belongs to the kernels: the reference keeps K and V row by row, a native kernel may interleave
them for its dot units. With ``v_in_k`` (MLA) there is no V part: V is the first v_head_dim elements of each key.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KvView:
    """One layer of the cache. ``pieces [num_blocks, num_kv_heads, piece_elements]`` is a view of the storage."""

    pieces: torch.Tensor
    block_size: int
    head_dim: int
    v_head_dim: int
    v_in_k: bool = False

    @property
    def num_kv_heads(self) -> int:
        return self.pieces.shape[1]

    @property
    def keys(self) -> torch.Tensor:
        """View ``[num_blocks, num_kv_heads, block_size, head_dim]``."""
        return torch.unflatten(
            self.pieces[..., : self.block_size * self.head_dim], -1, (self.block_size, self.head_dim)
        )

    @property
    def values(self) -> torch.Tensor:
        """View ``[num_blocks, num_kv_heads, block_size, v_head_dim]``."""
        if self.v_in_k:
            return self.keys[..., : self.v_head_dim]
        return torch.unflatten(
            self.pieces[..., self.block_size * self.head_dim :], -1, (self.block_size, self.v_head_dim)
        )


def gather_pages(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``rows.index_select(0, index)``, moving four bytes at a time: torch gathers bf16 five times slower."""
    sizes = (*rows.stride()[:-1], rows.shape[-1], rows.storage_offset())
    if rows.dtype.itemsize == 2 and all(size % 2 == 0 for size in sizes):
        return rows.view(torch.float32).index_select(0, index).view(rows.dtype)
    return rows.index_select(0, index)


def view_layer(
    storage: torch.Tensor,
    slot: int,
    *,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    v_head_dim: int,
    v_in_k: bool = False,
) -> KvView:
    """Return the view of layer slot ``slot`` over ``storage [num_blocks, page_elements]``."""
    piece = block_size * (head_dim if v_in_k else head_dim + v_head_dim)
    start = slot * num_kv_heads * piece
    assert start + num_kv_heads * piece <= storage.shape[1], "the layer slot lies beyond the page"
    pieces = torch.unflatten(storage[:, start : start + num_kv_heads * piece], 1, (num_kv_heads, piece))
    return KvView(pieces, block_size, head_dim, v_head_dim, v_in_k)
