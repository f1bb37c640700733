"""Attention over the paged cache: prompt chunks and single tokens in one ragged call.

Row i of ``q`` belongs to the sequence s with ``cu_seqlens_q[s] ≤ i < cu_seqlens_q[s + 1]``; its absolute position is
``seq_lens[s] − (cu_seqlens_q[s + 1] − i)``. It sees the positions 0 … its own, or with a window the last ``window`` of
them. Keys and values, those of this step included, are read from the cache through ``block_table``.

The reference is exact: fixed tiles of 64 KV positions at absolute multiples, one partial softmax per tile.

For a row r and a tile j (Milakov and Gimelshein 2018, Dao et al. 2022, with the maximum taken over all tiles):

    s_j = scale · q_r · K_jᵀ (capped, masked)      m_j = max s_j      p_j = exp(s_j − m_j)      l_j = Σ p_j
    M = max_j m_j      w_j = exp(m_j − M)      out = Σ_j w_j (p_j V_j) / Σ_j w_j l_j      summed in order of j

Why the bits of a row depend only on its own q and the K and V that it sees:

* a tile starts at an absolute position, so a chunk, a single token and a cached prefix cut the keys alike;
* both products always have one shape, [row_tile, head_dim] × [head_dim, 64] and [row_tile, 64] × [64, v_head_dim],
  padded to multiples of 16, where MKL's batched sgemm gave a row the same bits in any place and batch (measured;
  unpadded it did not, e.g. v_head_dim 6 or 20), and run on one thread;
* a tile that a row does not see has w_j = 0 exactly and adds 0, so whether it is computed changes nothing. This needs
  finite K and V in every block: the worker clears blocks when a sequence gets them.

All in fp32, whatever the cache holds. The batch is cut into pairs of one fixed shape each:

    items   tiles of `row_tile` rows of one sequence (`batch.cut_rows`)
    tiles   of KV: `tile` positions, starting at absolute multiples of `tile`
    pairs   every item with every tile that any of its rows sees; ordered tile-ordinal-major:

        ordinal 0: item 0, item 1, item 2, …, item n₀ − 1        (items sorted by number of tiles, most first)
        ordinal 1: item 0, item 1, …, item n₁ − 1                n₀ ≥ n₁ ≥ …

so that the pairs of one ordinal are a slice, and belong to a prefix of the items.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.attention.batch import AttentionShape, HostPlan, LayerKind, Planner, RaggedBatch, cut_rows
from quire.kernels.kv_blocks import KvView
from quire.kernels.registry import op
from quire.kernels.threads import one_torch_thread
from quire.parallel.stripe import Stripe

TILE = 64  # positions
ALIGN = 16  # elements of head_dim and v_head_dim
_LOWEST = -1e30  # maximum of a row that sees nothing in a tile: exp gives 0
# Gathered K and V at once, 4 MiB: they stay in the caches, so reading them twice is free.
_CHUNK_FLOATS = 1 << 20

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
    row_index: Tensor
    pair_row_index: Tensor
    pair_item: Tensor
    blocks: Tensor
    bias: Tensor
    ordinals: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a batch is cut for layers of one kind. Lanes of a tile of KV beyond its ``positions`` are masked."""

    group: int  # query heads per kv head
    row_tile: int
    blocks_per_tile: int
    positions: int  # per tile
    tile: int  # lanes
    window: int | None
    max_pairs: int  # per chunk
    stripe: Stripe | None = None
    both_ways: bool = False


def row_tile_of(group: int) -> int:
    """Rows of an item for ``group`` query heads per kv head: a constant of the layer, 8 … 64."""
    return min(64, max(8, 1 << (group - 1).bit_length()))


@op("attention")
def attention(
    q: Tensor, kv: KvView, batch: RaggedBatch, shape: AttentionShape, sinks: Tensor | None
) -> Tensor:
    """``q [num_tokens, num_heads, head_dim]`` → ``[num_tokens, num_heads, v_head_dim]`` in q's dtype.

    Query head h reads kv head ``h // (num_heads / num_kv_heads)``. ``sinks [num_heads]`` fp32: one more logit in each
    head's denominator, with no value (gpt-oss). MLA is this op with one kv head whose value is a part of the key.
    """
    assert kv.stripe is None
    num_tokens, num_heads, _ = q.shape
    kv_heads, group = kv.num_kv_heads, num_heads // kv.num_kv_heads
    if num_tokens == 0:
        return q.new_empty(0, num_heads, kv.v_head_dim)
    out = torch.empty(kv_heads, num_tokens * group + 1, kv.v_head_dim)
    for chunk, acc, total, top in attend_chunks(q, kv, batch, shape):
        if sinks is not None:
            add = import_module("quire.kernels.attention.sinks").add_sinks
            acc, total = add(acc, total, top, sinks, chunk, num_tokens)
        acc = acc[..., : kv.v_head_dim] / total.unsqueeze(-1)
        out.index_copy_(1, chunk.row_index, acc.reshape(kv_heads, -1, kv.v_head_dim))
    out = out[:, :-1].view(kv_heads, num_tokens, group, kv.v_head_dim)
    return out.transpose(0, 1).reshape(num_tokens, num_heads, kv.v_head_dim).to(q.dtype)


def attend_chunks(
    q: Tensor, kv: KvView, batch: RaggedBatch, shape: AttentionShape
) -> Iterator[tuple[PairChunk, Tensor, Tensor, Tensor]]:
    """Yield each chunk of the batch with its sums: values, weights and maxima, as `_attend` returns them."""
    num_tokens, _, head_dim = q.shape
    kv_heads, group = kv.num_kv_heads, q.shape[1] // kv.num_kv_heads
    # Rows that see the same keys are many: their items are as tall as a tile is wide, and share what is gathered.
    row_tile = TILE if shape.both_ways else row_tile_of(group)
    # Row (token, head in group) of each kv head; a row of zeros at the end stands in for the padding of items.
    rows = torch.zeros(kv_heads, num_tokens * group + 1, _align(head_dim))
    grouped = rows[:, :-1].view(kv_heads, num_tokens, group, -1)
    grouped[..., :head_dim] = q.view(num_tokens, kv_heads, group, head_dim).transpose(0, 1)
    rows *= shape.scale
    for chunk in _chunks(batch, kv, group, row_tile, shape):
        yield chunk, *_attend(rows, kv, chunk, row_tile, shape)


def _align(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _chunks(
    batch: RaggedBatch, kv: KvView, group: int, row_tile: int, shape: AttentionShape
) -> list[PairChunk]:
    """Return the cut of the batch, which the first layer makes and the others of its group reuse."""
    blocks_per_tile = -(-TILE // kv.block_size)
    positions = blocks_per_tile * kv.block_size
    tile = _align(positions)
    floats_per_pair = kv.num_kv_heads * tile * (_align(kv.head_dim) + _align(kv.v_head_dim) + 2 * row_tile)
    max_pairs = max(1, _CHUNK_FLOATS // floats_per_pair)
    tiling = Tiling(
        group, row_tile, blocks_per_tile, positions, tile, shape.window, max_pairs, kv.stripe, shape.both_ways
    )
    return batch.plan(("reference", tiling), lambda: cut_pairs(batch, tiling))


def _attend(
    rows: Tensor, kv: KvView, chunk: PairChunk, row_tile: int, shape: AttentionShape
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the unnormalised output ``[kv_heads, items, used, v_dim]``, its denominator and its maximum.

    The products are of whole row tiles; the operations between them are of the rows in use alone.
    """
    kv_heads = rows.shape[0]
    num_pairs, used, tile = chunk.bias.shape
    keys, values = _gather(kv, chunk.blocks, num_pairs, tile)  # [kv_heads · pairs, tile, dim]
    queries = rows.index_select(1, chunk.pair_row_index).view(kv_heads * num_pairs, row_tile, -1)
    with one_torch_thread():
        weights = torch.bmm(queries, keys.transpose(1, 2)).view(kv_heads, num_pairs, row_tile, tile)
    scores = weights[:, :, :used]
    if shape.soft_cap is not None:
        scores.div_(shape.soft_cap).tanh_().mul_(shape.soft_cap)
    scores += chunk.bias
    tile_top = scores.amax(-1).clamp_min_(_LOWEST)  # [kv_heads, pairs, used]
    tile_total = scores.sub_(tile_top.unsqueeze(-1)).exp_().sum(-1)
    with one_torch_thread():
        partial = torch.bmm(weights.view(-1, row_tile, tile), values).view(kv_heads, num_pairs, row_tile, -1)
    partial = partial[:, :, :used]
    if len(chunk.ordinals) == 1:
        return partial, tile_total, tile_top
    top = tile_top[:, : chunk.ordinals[0][1]].clone()
    for start, items in chunk.ordinals[1:]:
        torch.maximum(top[:, :items], tile_top[:, start : start + items], out=top[:, :items])
    rescale = tile_top.sub_(top.index_select(1, chunk.pair_item)).exp_()  # 0 for what a row does not see
    partial *= rescale.unsqueeze(-1)
    tile_total *= rescale
    items = chunk.ordinals[0][1]
    acc, total = partial[:, :items].clone(), tile_total[:, :items].clone()
    for start, items in chunk.ordinals[1:]:
        acc[:, :items] += partial[:, start : start + items]
        total[:, :items] += tile_total[:, start : start + items]
    return acc, total, top


def _gather(kv: KvView, blocks: Tensor, num_pairs: int, tile: int) -> tuple[Tensor, Tensor]:
    """Read the blocks of every pair: fp32 ``[kv_heads · pairs, tile, dim]``, padded with zeros to whole ALIGNs."""
    rows_k, rows_v = kv.read(blocks)

    def unpack(rows: Tensor, dim: int) -> Tensor:
        per_tile = len(blocks) // num_pairs
        rows = torch.unflatten(rows, 0, (num_pairs, per_tile))  # [pairs, blocks, kv_heads, block_size, dim]
        padded = _align(dim) != dim or per_tile * kv.block_size != tile
        make = torch.zeros if padded else torch.empty
        target = make(kv.num_kv_heads, num_pairs, tile, _align(dim))
        tiled = torch.unflatten(target[:, :, : per_tile * kv.block_size, :dim], 2, (per_tile, kv.block_size))
        tiled.copy_(rows.permute(2, 0, 1, 3, 4))
        return target.view(kv.num_kv_heads * num_pairs, tile, -1)

    keys = unpack(rows_k, kv.head_dim)
    if kv.v_in_k:
        return keys, keys[..., : _align(kv.v_head_dim)]
    return keys, unpack(rows_v, kv.v_head_dim)


def cut_pairs(batch: RaggedBatch, tiling: Tiling) -> list[PairChunk]:
    """Return the chunks of a batch, as many pairs in each as may be computed at once."""
    group = tiling.group
    items = cut_rows(
        batch, np.arange(batch.num_seqs), group=group, rows=tiling.row_tile, window=tiling.window, stripe=tiling.stripe
    )  # fmt: skip
    q_lens = np.diff(batch.cu_seqlens_q)
    start = batch.seq_lens - q_lens  # position of the first query
    low = items.low // tiling.positions
    item_ends = batch.seq_lens[items.seq] if tiling.both_ways else items.end
    # A row that sees nothing has a tile all of which is masked.
    num_tiles = np.maximum((item_ends - 1) // tiling.positions - low + 1, 1)
    order = np.argsort(-num_tiles, kind="stable")
    ends = np.cumsum(num_tiles[order])
    chunks = []
    begin = 0
    while begin < len(order):
        done = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, done + tiling.max_pairs, side="right")))
        chosen = order[begin:end]
        seq = items.seq[chosen]
        # [items, row_tile], within the sequence
        rows = items.first_row[chosen, None] + np.arange(tiling.row_tile)
        valid = rows < (q_lens[seq] * group)[:, None]
        row_index = np.where(
            valid, batch.cu_seqlens_q[seq, None] * group + rows, batch.cu_seqlens_q[-1] * group
        )
        seen = _seen(tiling, np.where(valid, start[seq, None] + rows // group, -1), batch.seq_lens[seq, None])
        used = int(valid.sum(1).max())
        chunks.append(_pair(batch, tiling, seq, low[chosen], num_tiles[chosen], row_index, seen, used))
        begin = end
    return chunks


def _seen(tiling: Tiling, row_position: IntArray, seq_lens: IntArray) -> tuple[IntArray, IntArray]:
    """Return the first position of the cache that each row sees, and the one behind the last; −1 sees none."""
    first, end = np.zeros_like(row_position), row_position + 1
    if tiling.window is not None:
        first = np.maximum(end - tiling.window, 0)
    if tiling.both_ways:
        end = np.where(row_position < 0, 0, seq_lens)
    return (first, end) if tiling.stripe is None else (tiling.stripe.below(first), tiling.stripe.below(end))


def _pair(
    batch: RaggedBatch, tiling: Tiling, seq: IntArray, low: IntArray, num_tiles: IntArray, row_index: IntArray,
    seen: tuple[IntArray, IntArray], used: int,
) -> PairChunk:  # fmt: skip
    blocks_per_tile = tiling.blocks_per_tile
    ordinals = np.arange(int(num_tiles[0]))
    counts = np.searchsorted(-num_tiles, -ordinals, side="left")  # items with more tiles than the ordinal
    ordinal = np.repeat(ordinals, counts)
    starts = np.cumsum(counts) - counts
    item = np.arange(len(ordinal)) - np.repeat(starts, counts)
    tile_index = low[item] + ordinal
    columns = tile_index[:, None] * blocks_per_tile + np.arange(blocks_per_tile)
    columns = np.minimum(columns, batch.block_table.shape[1] - 1)  # masked beyond the table
    blocks = batch.block_table[seq[item][:, None], columns]
    lane = np.arange(tiling.tile)
    position = tile_index[:, None] * tiling.positions + lane  # [pairs, tile]
    first, end = (bound[item, :used, None] for bound in seen)
    masked = (position[:, None, :] >= end) | (lane >= tiling.positions)
    if tiling.window is not None:
        masked |= position[:, None, :] < first
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


@op("attention.planner")
def planner(layers: Iterable[LayerKind], device: torch.device) -> Planner:
    """Return what plans the steps of one cache group on the host, for layers of these kinds.

    The runner uploads a plan's arrays with the step and restores them to the batch, so that no layer cuts it again.
    Kernels of a CPU read the batch where it lies: nothing is uploaded.
    """
    return lambda batch, limits: HostPlan([], lambda batch, there, views: None)
