"""Paged attention in Triton: prompt tiles in one pass, single tokens split over their keys, then folded in order.

Bytes: K and V of every visible position once per tile of rows, q and the output once; a split adds (v_head_dim + 2)
fp32 per row, written and read. Decoding is bound by these bytes, prompts by the two products: 2 · 2 · head_dim FLOPs
per pair.

Flash-decoding's split and fold (Dao et al. 2023) over the online softmax of Milakov and Gimelshein 2018, in powers of
two. Query heads of a kv head are rows of one tile (GQA packing), so that keys are read once for all of them.

Invariant version: one tile shape, splits of `triton_plan.SPLIT` positions at absolute multiples, always folded. A row's
bits are then those of its own keys: a masked key has the weight 0, a split that a row does not see has the factor 0.
"""

from __future__ import annotations

from functools import partial
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import attention as op
from quire.kernels.attention import flashinfer
from quire.kernels.attention.batch import AttentionShape, DeviceBatch, LayerKind, RaggedBatch
from quire.kernels.attention.triton_plan import DeviceWork, device_batch, device_plan
from quire.kernels.kv_blocks import KvView
from quire.kernels.triton_overlap import follow, launch_options
from quire.kernels.workspace import unit_stride

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # maximum of a row that has seen nothing: exp2 gives 0


def attend(
    q: Tensor, kv: KvView, batch: RaggedBatch, shape: AttentionShape, sinks: Tensor | None, *, invariant: bool
) -> Tensor:
    num_tokens, num_heads, head_dim = q.shape
    assert kv.layout == "rows", "GPU kernels read rows"
    assert head_dim == kv.head_dim, (head_dim, kv.head_dim)
    q = unit_stride(q)
    out = torch.empty(num_tokens, num_heads, kv.v_head_dim, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    there = device_batch(batch, q.device)
    kind = LayerKind(num_heads // kv.num_kv_heads, shape.window, kv, sinks is not None)
    plan = device_plan(batch, kind, q.device, invariant=invariant)
    if plan.works is None:
        assert sinks is None
        flashinfer.attend(q, kv, batch, shape, out)
    for work in plan.works or ():
        _run(q, kv, there, shape, sinks, out, work)
    return out


op.attention.version("triton")(partial(attend, invariant=False))
op.attention.version("invariant")(partial(attend, invariant=True))


def _run(
    q: Tensor, kv: KvView, batch: DeviceBatch, shape: AttentionShape, sinks: Tensor | None,
    out: Tensor, work: DeviceWork,
) -> None:  # fmt: skip
    kv_heads, group = kv.num_kv_heads, shape.num_heads // kv.num_kv_heads
    num_items = work.items.shape[0]
    v_pad = _power_of_two(kv.v_head_dim)
    sums, tops = out, out  # not used where every tile is written directly
    if not work.shape.direct:
        sums = torch.empty(num_items, kv_heads, work.shape.rows, v_pad, dtype=torch.float32, device=q.device)
        tops = torch.empty(num_items, kv_heads, 2, work.shape.rows, dtype=torch.float32, device=q.device)
    pieces, scales = kv.pieces, kv.pieces
    if kv.scaled:
        scales = kv.pieces.view(torch.float32)
    rope_dim = kv.head_dim - kv.v_head_dim if kv.v_in_k else 0
    attend_items[(num_items, kv_heads)](
        q, q.stride(0), q.stride(1),
        pieces, pieces.stride(0), pieces.stride(1), scales, scales.stride(0), scales.stride(1),
        batch.block_table, batch.block_table.stride(0), batch.cu_seqlens_q, batch.seq_lens, work.items,
        out if sinks is None else sinks, out, sums, tops,
        shape.scale, shape.soft_cap or 1.0, shape.window or 0,
        GROUP=group, HEAD_DIM=kv.head_dim, HEAD_PAD=_power_of_two(kv.head_dim - rope_dim), ROPE_DIM=rope_dim,
        ROPE_PAD=_power_of_two(rope_dim), V_DIM=kv.v_head_dim, V_PAD=v_pad, BLOCK_SIZE=kv.block_size,
        ROWS=work.shape.rows, KEYS=work.shape.keys, V_IN_K=kv.v_in_k, SCALED=kv.scaled,
        CAPPED=shape.soft_cap is not None,
        WINDOWED=shape.window is not None, SINKS=sinks is not None, DIRECT=work.shape.direct,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=work.shape.num_warps,
        num_stages=work.shape.num_stages, **launch_options(),
    )  # fmt: skip
    if not work.shape.direct:
        fold_items[(work.tiles.shape[0], kv_heads)](
            sums, tops, work.tiles, batch.cu_seqlens_q, out if sinks is None else sinks, out,
            GROUP=group, V_DIM=kv.v_head_dim, V_PAD=v_pad, ROWS=work.shape.rows, SINKS=sinks is not None, num_warps=4,
            **launch_options(),
        )  # fmt: skip


def _power_of_two(size: int) -> int:
    """At least 16, the least that a matrix unit takes."""
    return max(16, 1 << (size - 1).bit_length()) if size else 16


@triton.jit
@no_type_check
def attend_items(
    q, q_token_stride, q_head_stride,
    pieces, block_stride, head_stride, scales, scale_block_stride, scale_head_stride,
    block_table, table_stride, cu_seqlens_q, seq_lens, items,
    sinks, out, sums, tops,
    scale, soft_cap, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, ROPE_DIM: tl.constexpr, ROPE_PAD: tl.constexpr,
    V_DIM: tl.constexpr, V_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    V_IN_K: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr,
    DIRECT: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
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
    first_token = tl.load(cu_seqlens_q + seq)
    num_rows = (tl.load(cu_seqlens_q + seq + 1) - first_token) * GROUP
    start = tl.load(seq_lens + seq) - num_rows // GROUP
    follow(OVERLAP)
    if begin >= end:  # padding of a graph's grid
        return

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
    factor = scale if CAPPED else scale * LOG2_E
    seen_by_all = tl.minimum(end, start + first_row // GROUP + 1)  # positions before it need no mask
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
            scores *= (tl.load(scale_row, mask=there, other=0.0) * factor)[None, :]
        else:
            scores *= factor
        if CAPPED:  # cap · tanh(s / cap)
            scores = LOG2_E * soft_cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / soft_cap)) + 1.0))
        if WINDOWED or not DIRECT or first + KEYS > seen_by_all:
            seen = there[None, :] & (key[None, :] <= position[:, None])
            if WINDOWED:
                seen &= key[None, :] > position[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
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
@no_type_check
def fold_items(
    sums, tops, tiles, cu_seqlens_q, sinks, out,
    GROUP: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr, ROWS: tl.constexpr, SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (tile, kv head): ``Σ_j w_j sums_j / Σ_j w_j totals_j`` in order of j, w_j = 2^(top_j − the largest)."""
    tile, kv_head, kv_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    seq = tl.load(tiles + tile * 4)
    first_row = tl.load(tiles + tile * 4 + 1)
    first_item = tl.load(tiles + tile * 4 + 2)
    num_items = tl.load(tiles + tile * 4 + 3)
    first_token = tl.load(cu_seqlens_q + seq)
    num_rows = (tl.load(cu_seqlens_q + seq + 1) - first_token) * GROUP
    follow(OVERLAP)
    if num_items == 0:
        return
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
