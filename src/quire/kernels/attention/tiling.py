"""Cut a ragged batch into pairs (row tile, KV tile) of one fixed shape each.

    rows    of one kv head: (token, query head of its group), token-major; `row_tile` of them make an item
    tiles   of KV: `tile` positions, starting at absolute multiples of `tile`
    pairs   every item with every tile that any of its rows sees; ordered tile-ordinal-major:

        ordinal 0: item 0, item 1, item 2, …, item n₀ − 1        (items sorted by number of tiles, most first)
        ordinal 1: item 0, item 1, …, item n₁ − 1                n₀ ≥ n₁ ≥ …

so that the pairs of one ordinal are a slice, and belong to a prefix of the items. Made once a step for all the layers
of a cache group, in numpy, with no loop over tokens or sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.attention.batch import RaggedBatch

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PairChunk:
    """Some items with all of their tiles, few enough to be computed at once.

    ``used`` ≤ row_tile: no item of the chunk has more rows (decoding: one token's heads).
    ``row_index [num_items · used]``: row of (token, head in group), ``num_rows`` for padding.
    ``pair_row_index [num_pairs · row_tile]``: the same for every pair. ``blocks [num_pairs · blocks_per_tile]``.
    ``bias [num_pairs, used, tile]`` fp32: −inf at scores that a row must not see, else 0.
    ``ordinals``: (first pair, number of items).
    """

    used: int
    row_index: torch.Tensor
    pair_row_index: torch.Tensor
    pair_item: torch.Tensor
    blocks: torch.Tensor
    bias: torch.Tensor
    ordinals: tuple[tuple[int, int], ...]


def cut(
    batch: RaggedBatch,
    *,
    group: int,
    row_tile: int,
    block_size: int,
    blocks_per_tile: int,
    tile: int,
    window: int | None,
    max_pairs: int,
) -> list[PairChunk]:
    """Return the chunks for ``group`` query heads a kv head. Lanes of ``tile`` beyond the blocks are masked."""
    positions_per_tile = blocks_per_tile * block_size
    q_lens = np.diff(batch.cu_seqlens_q)
    num_items = -(-(q_lens * group) // row_tile)
    seq = np.repeat(np.arange(batch.num_seqs), num_items)  # [items]
    first_row = (np.arange(len(seq)) - np.repeat(np.cumsum(num_items) - num_items, num_items)) * row_tile
    last_row = np.minimum(first_row + row_tile, q_lens[seq] * group) - 1
    start = batch.seq_lens - q_lens  # position of the first query
    low = np.zeros_like(first_row)
    if window is not None:
        low = np.maximum(start[seq] + first_row // group - window + 1, 0) // positions_per_tile
    num_tiles = (start[seq] + last_row // group) // positions_per_tile - low + 1
    order = np.argsort(-num_tiles, kind="stable")
    ends = np.cumsum(num_tiles[order])
    chunks = []
    begin = 0
    while begin < len(order):
        done = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, done + max_pairs, side="right")))
        items = order[begin:end]
        rows = first_row[items, None] + np.arange(row_tile)  # [items, row_tile], within the sequence
        valid = rows < (q_lens[seq[items]] * group)[:, None]
        row_index = np.where(
            valid, batch.cu_seqlens_q[seq[items], None] * group + rows, batch.cu_seqlens_q[-1] * group
        )
        row_position = np.where(valid, start[seq[items], None] + rows // group, -1)
        chunks.append(
            _pair(
                batch, seq[items], low[items], num_tiles[items], row_index, row_position,
                (blocks_per_tile, positions_per_tile, tile, window),
            )
        )  # fmt: skip
        begin = end
    return chunks


def _pair(
    batch: RaggedBatch,
    seq: IntArray,
    low: IntArray,
    num_tiles: IntArray,
    row_index: IntArray,
    row_position: IntArray,
    tiling: tuple[int, int, int, int | None],
) -> PairChunk:
    blocks_per_tile, positions_per_tile, tile, window = tiling
    ordinals = np.arange(int(num_tiles[0]))
    counts = np.searchsorted(-num_tiles, -ordinals, side="left")  # items with more tiles than the ordinal
    ordinal = np.repeat(ordinals, counts)
    starts = np.cumsum(counts) - counts
    item = np.arange(len(ordinal)) - np.repeat(starts, counts)
    tile_index = low[item] + ordinal
    columns = tile_index[:, None] * blocks_per_tile + np.arange(blocks_per_tile)
    columns = np.minimum(columns, batch.block_table.shape[1] - 1)  # what lies beyond is masked
    blocks = batch.block_table[seq[item][:, None], columns]
    lane = np.arange(tile)
    position = tile_index[:, None] * positions_per_tile + lane  # [pairs, tile]
    used = int((row_position >= 0).sum(1).max())
    limit = row_position[item, :used]
    masked = (position[:, None, :] > limit[:, :, None]) | (lane >= positions_per_tile)
    if window is not None:
        masked |= position[:, None, :] <= limit[:, :, None] - window
    bias = np.zeros(masked.shape, np.float32)
    bias[masked] = -np.inf
    return PairChunk(
        used=used,
        row_index=torch.from_numpy(row_index[:, :used].reshape(-1)),
        pair_row_index=torch.from_numpy(row_index[item].reshape(-1)),
        pair_item=torch.from_numpy(item),
        blocks=torch.from_numpy(blocks.reshape(-1)),
        bias=torch.from_numpy(bias),
        ordinals=tuple((int(a), int(n)) for a, n in zip(starts, counts, strict=True)),
    )
