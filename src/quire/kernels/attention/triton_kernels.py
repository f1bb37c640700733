"""The two kernels of `kernels.attention.triton`: what one item does, and how the items of a tile are folded."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # the maximum of a row that has seen nothing; exp2(−inf − LOWEST) = 0


@triton.jit
def attend_items(
    q, q_token_stride, q_head_stride,
    pieces, block_stride, head_stride, scales, scale_block_stride, scale_head_stride,
    block_table, table_stride, cu_seqlens_q, seq_lens, items,
    sinks, out, sums, tops,
    scale, soft_cap, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, ROPE_DIM: tl.constexpr, ROPE_PAD: tl.constexpr,
    V_DIM: tl.constexpr, V_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    V_IN_K: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr,
    DIRECT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (item, kv head): the online softmax of the item's rows over its positions.

    With V_IN_K the head is [latent, V_DIM wide | rope, ROPE_DIM wide], scores are two products and V is the latent:
    K is read once. Otherwise ROPE_DIM is 0.
    """
    item, kv_head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(items + item * 4)
    first_row = tl.load(items + item * 4 + 1)
    begin = tl.load(items + item * 4 + 2)
    end = tl.load(items + item * 4 + 3)
    if begin >= end:  # padding of a graph's grid
        return
    first_token = tl.load(cu_seqlens_q + seq)
    num_rows = (tl.load(cu_seqlens_q + seq + 1) - first_token) * GROUP
    start = tl.load(seq_lens + seq) - num_rows // GROUP

    row = first_row + tl.arange(0, ROWS)
    row_used = row < num_rows
    head = kv_head * GROUP + row % GROUP
    position = start + row // GROUP
    dim = tl.arange(0, HEAD_PAD)
    q_row = q + (first_token + row // GROUP).to(tl.int64) * q_token_stride + head * q_head_stride
    q_tile = tl.load(
        q_row[:, None] + dim[None, :],
        mask=row_used[:, None] & (dim < HEAD_DIM - ROPE_DIM)[None, :],
        other=0.0,
    )
    rope = tl.arange(0, ROPE_PAD)
    if V_IN_K:
        q_rope = tl.load(
            q_row[:, None] + (V_DIM + rope)[None, :],
            mask=row_used[:, None] & (rope < ROPE_DIM)[None, :],
            other=0.0,
        )
    lowest = 0
    if WINDOWED:
        lowest = tl.maximum(start + first_row // GROUP - window + 1, 0)
    v_dim = tl.arange(0, V_PAD)
    top = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, V_PAD), tl.float32)
    for first in range(begin, end, KEYS):
        key = first + tl.arange(0, KEYS)
        there = (key < end) & (key >= lowest)
        block = tl.load(block_table + seq * table_stride + key // BLOCK_SIZE, mask=there, other=0).to(
            tl.int64
        )
        piece = pieces + block * block_stride + kv_head * head_stride
        k_row = piece + (key % BLOCK_SIZE) * HEAD_DIM
        k_tile = tl.load(
            k_row[None, :] + dim[:, None],
            mask=there[None, :] & (dim < HEAD_DIM - ROPE_DIM)[:, None],
            other=0.0,
        ).to(q_tile.dtype)
        scores = tl.dot(q_tile, k_tile, input_precision=PRECISION)
        if V_IN_K:
            k_rope = tl.load(
                k_row[None, :] + (V_DIM + rope)[:, None],
                mask=there[None, :] & (rope < ROPE_DIM)[:, None],
                other=0.0,
            ).to(q_tile.dtype)
            scores += tl.dot(q_rope, k_rope, input_precision=PRECISION)
        if SCALED:  # scales of K, then of V, behind the rows of both
            scale_row = scales + block * scale_block_stride + kv_head * scale_head_stride + key % BLOCK_SIZE
            scale_row += BLOCK_SIZE * (HEAD_DIM + V_DIM) // 4
            scores *= tl.load(scale_row, mask=there, other=0.0)[None, :]
        scores *= scale
        if CAPPED:  # cap · tanh(s / cap)
            scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / soft_cap)) + 1.0))
        seen = there[None, :] & (key[None, :] <= position[:, None])
        if WINDOWED:
            seen &= key[None, :] > position[:, None] - window
        scores = tl.where(seen, scores * LOG2_E, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weights, 1)
        if SCALED:
            weights *= tl.load(scale_row + BLOCK_SIZE, mask=there, other=0.0)[None, :]
        if V_IN_K:
            v_tile = tl.trans(k_tile)
        else:
            v_row = piece + BLOCK_SIZE * HEAD_DIM + (key % BLOCK_SIZE) * V_DIM
            v_tile = tl.load(
                v_row[:, None] + v_dim[None, :], mask=there[:, None] & (v_dim < V_DIM)[None, :], other=0.0
            ).to(q_tile.dtype)
        acc = acc * rescale[:, None] + tl.dot(weights.to(q_tile.dtype), v_tile, input_precision=PRECISION)
        top = new_top

    if DIRECT:
        if SINKS:
            sink = tl.load(sinks + head) * LOG2_E
            new_top = tl.maximum(top, sink)
            acc *= tl.exp2(top - new_top)[:, None]
            total = total * tl.exp2(top - new_top) + tl.exp2(sink - new_top)
        heads = tl.num_programs(1) * GROUP
        target = out + ((first_token + row // GROUP).to(tl.int64) * heads + head) * V_DIM
        mask = row_used[:, None] & (v_dim < V_DIM)[None, :]
        tl.store(target[:, None] + v_dim[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
    else:
        part = item.to(tl.int64) * tl.num_programs(1) + kv_head
        slot = tl.arange(0, ROWS)
        tl.store(tops + part * 2 * ROWS + slot, top, mask=row_used)
        tl.store(tops + part * 2 * ROWS + ROWS + slot, total, mask=row_used)
        tl.store(
            sums + (part * ROWS + slot)[:, None] * V_PAD + v_dim[None, :], acc,
            mask=row_used[:, None] & (v_dim < V_DIM)[None, :],
        )  # fmt: skip


@triton.jit
def fold_items(
    sums, tops, tiles, cu_seqlens_q, sinks, out,
    GROUP: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr, ROWS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Program (tile, kv head): ``Σ_j w_j sums_j / Σ_j w_j totals_j`` in order of j, w_j = 2^(top_j − the largest)."""
    tile, kv_head, kv_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    seq = tl.load(tiles + tile * 4)
    first_row = tl.load(tiles + tile * 4 + 1)
    first_item = tl.load(tiles + tile * 4 + 2)
    num_items = tl.load(tiles + tile * 4 + 3)
    if num_items == 0:
        return
    first_token = tl.load(cu_seqlens_q + seq)
    num_rows = (tl.load(cu_seqlens_q + seq + 1) - first_token) * GROUP
    slot = tl.arange(0, ROWS)
    row = first_row + slot
    row_used = row < num_rows
    head = kv_head * GROUP + row % GROUP
    v_dim = tl.arange(0, V_PAD)
    largest = tl.full((ROWS,), LOWEST, tl.float32)
    for j in range(num_items):
        part = (first_item + j).to(tl.int64) * kv_heads + kv_head
        largest = tl.maximum(largest, tl.load(tops + part * 2 * ROWS + slot, mask=row_used, other=LOWEST))
    total = tl.zeros((ROWS,), tl.float32)
    if SINKS:
        sink = tl.load(sinks + head) * LOG2_E
        largest = tl.maximum(largest, sink)
        total = tl.exp2(sink - largest)
    acc = tl.zeros((ROWS, V_PAD), tl.float32)
    mask = row_used[:, None] & (v_dim < V_DIM)[None, :]
    for j in range(num_items):
        part = (first_item + j).to(tl.int64) * kv_heads + kv_head
        weight = tl.exp2(tl.load(tops + part * 2 * ROWS + slot, mask=row_used, other=LOWEST) - largest)
        total += weight * tl.load(tops + part * 2 * ROWS + ROWS + slot, mask=row_used, other=1.0)
        acc += weight[:, None] * tl.load(
            sums + (part * ROWS + slot)[:, None] * V_PAD + v_dim[None, :], mask=mask, other=0.0
        )
    target = out + ((first_token + row // GROUP).to(tl.int64) * (kv_heads * GROUP) + head) * V_DIM
    total = tl.where(row_used, total, 1.0)
    tl.store(target[:, None] + v_dim[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
