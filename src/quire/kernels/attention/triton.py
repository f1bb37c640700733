"""Paged attention in Triton: prompt tiles in one pass, single tokens split over their keys, then folded in order.

Bytes: K and V of every visible position once a tile of rows, q and the output once; a split adds (v_head_dim + 2) fp32
a row, written and read. Decoding is bound by these bytes, prompts by the two products: 2 · 2 · head_dim FLOPs a pair.

Flash-decoding's split and fold (Dao et al. 2023) over the online softmax of Milakov and Gimelshein 2018, in powers of
two. Query heads of a kv head are rows of one tile (GQA packing), so that keys are read once for all of them.

Invariant version: one tile shape, splits of `SPLIT` positions at absolute multiples, always folded. A row's bits are
then those of its own keys: a masked key has the weight 0, a split that a row does not see has the factor 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.attention import flashinfer
from quire.kernels.attention.batch import AttentionShape, RaggedBatch
from quire.kernels.attention.triton_kernels import attend_items, fold_items
from quire.kernels.attention.work import WHOLE, Work, cut_work, split_for
from quire.kernels.block_sizes import block_sizes
from quire.kernels.kv_blocks import KvView
from quire.kernels.registry import register

SPLIT = 512  # positions of a split of the invariant version: a constant, since it is part of the result
DECODE_ROWS = 16  # rows of a tile in decode: the least that a matrix unit takes
PROGRAMS_PER_UNIT = 4  # items a multiprocessor should have to hide its memory's latency
LEAST_SPLIT = 128  # positions


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """A `Work` on the device, with its tile shape; of no rows where `flashinfer` computes the step.

    ``direct``: every tile is one item, written without folding.
    """

    items: torch.Tensor  # int32 [num_items, 4]
    tiles: torch.Tensor  # int32 [num_tiles, 4]
    rows: int
    keys: int
    num_warps: int
    direct: bool


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """The arrays of a `RaggedBatch` on the device, int32."""

    cu_seqlens_q: torch.Tensor  # [num_seqs + 1]
    seq_lens: torch.Tensor  # [num_seqs]
    block_table: torch.Tensor  # [num_seqs, max_blocks]


@register("attention", "triton")
def attention(
    q: torch.Tensor, kv: KvView, batch: RaggedBatch, shape: AttentionShape, sinks: torch.Tensor | None
) -> torch.Tensor:
    """``q [num_tokens, num_heads, head_dim]`` → ``[num_tokens, num_heads, v_head_dim]``."""
    return _attend(q, kv, batch, shape, sinks, invariant=False)


@register("attention", "invariant")
def attention_invariant(
    q: torch.Tensor, kv: KvView, batch: RaggedBatch, shape: AttentionShape, sinks: torch.Tensor | None
) -> torch.Tensor:
    """The same with one tile shape and fixed splits: bits do not depend on the batch or on how a prompt is cut."""
    return _attend(q, kv, batch, shape, sinks, invariant=True)


def _attend(
    q: torch.Tensor, kv: KvView, batch: RaggedBatch, shape: AttentionShape, sinks: torch.Tensor | None, *,
    invariant: bool,
) -> torch.Tensor:  # fmt: skip
    num_tokens, num_heads, head_dim = q.shape
    assert kv.layout == "rows", "GPU kernels read rows"
    assert head_dim == kv.head_dim, (head_dim, kv.head_dim)
    if q.stride(2) != 1:
        q = q.contiguous()
    out = torch.empty(num_tokens, num_heads, kv.v_head_dim, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    on_device = device_batch(batch, q.device)
    group = num_heads // kv.num_kv_heads
    for work in works(batch, kv, group, shape.window, q.device, invariant=invariant, library=sinks is None):
        if work.rows == 0:
            assert sinks is None
            flashinfer.attend(q, kv, batch, shape, out)
        else:
            _run(q, kv, on_device, shape, sinks, out, work)
    return out


def device_batch(batch: RaggedBatch, device: torch.device) -> DeviceBatch:
    """Return the arrays on ``device``: those that the runner uploaded, or copies made here."""
    found: DeviceBatch | None = batch.plans.get(("device",))
    if found is None:
        arrays = (batch.cu_seqlens_q, batch.seq_lens, batch.block_table)
        found = DeviceBatch(*(_upload(array.astype(np.int32), device) for array in arrays))
        batch.plans[("device",)] = found
    return found


def works(
    batch: RaggedBatch, kv: KvView, group: int, window: int | None, device: torch.device, *, invariant: bool,
    library: bool,
) -> list[DeviceWork]:  # fmt: skip
    """Return the cut of the batch, made by the first layer that asks and kept for the others of its group."""
    key = work_key(kv, group, window, invariant=invariant)
    found: list[DeviceWork] | None = batch.plans.get(key)
    if found is None:
        cuts = plan_works(
            batch, kv, group, window, units=num_units(device), invariant=invariant, library=library
        )
        found = [
            DeviceWork(_upload(w.items, device), _upload(w.tiles, device), *sizes, direct)
            for w, sizes, direct in cuts
        ]
        batch.plans[key] = found
    return found


def work_key(kv: KvView, group: int, window: int | None, *, invariant: bool) -> tuple[Any, ...]:
    """Under which the works of layers of this kind are kept in ``RaggedBatch.plans``."""
    return ("triton", group, window, kv.num_kv_heads, kv.head_dim, invariant)


def most_works(
    num_tokens: int, num_seqs: int, num_positions: int, kv: KvView, group: int, *, units: int, invariant: bool
) -> list[tuple[int, int]]:
    """A graph's room: (items, tiles) that each of `plan_works` can have at most for so many tokens and sequences.

    Contexts have up to ``num_positions``. As many tokens as sequences: one each; else ``mixed``, and not invariant.
    """

    def tiles(rows: int) -> int:
        one_each = num_tokens == num_seqs
        return num_seqs * -(-group // rows) if one_each else num_tokens * group // rows + num_seqs

    if invariant:
        return [(tiles(DECODE_ROWS) * -(-num_positions // SPLIT), tiles(DECODE_ROWS))]
    found = []
    if group <= DECODE_ROWS:
        most = num_seqs * -(-num_positions // LEAST_SPLIT)
        share = num_seqs + units * PROGRAMS_PER_UNIT // kv.num_kv_heads + 1
        found.append((min(most, share), num_seqs))
    if group > DECODE_ROWS or num_tokens > num_seqs:
        found.append((tiles(block_sizes("attention_prefill", _shape(kv, group))["rows"]),) * 2)
    return found


def _shape(kv: KvView, group: int) -> str:
    return f"d{kv.head_dim}_g{group}_b{kv.pieces.dtype.itemsize}"


def plan_works(
    batch: RaggedBatch, kv: KvView, group: int, window: int | None, *, units: int, invariant: bool,
    mixed: bool = False, library: bool = False,
) -> list[tuple[Work, tuple[int, int, int], bool]]:  # fmt: skip
    """Return (work, (rows, keys, warps), direct) for the sequences that decode and for those that do not.

    ``mixed``: both, even where one is empty, for a graph that has both. ``library``: neither, of a step with prompts
    that `flashinfer` is wanted for.
    """
    q_lens = np.diff(batch.cu_seqlens_q)
    shape = _shape(kv, group)
    if invariant:
        sizes = block_sizes("attention_invariant", "all")
        seqs = np.flatnonzero(q_lens)
        options = [(seqs, (DECODE_ROWS, sizes["keys"], sizes["warps"]), SPLIT, False)] if len(seqs) else []
    else:
        options = []
        short = q_lens * group <= DECODE_ROWS
        if len(seqs := np.flatnonzero((q_lens > 0) & short)) or (mixed and group <= DECODE_ROWS):
            sizes = block_sizes("attention_decode", shape)
            split = split_for(
                batch.cu_seqlens_q, batch.seq_lens, seqs, kv_heads=kv.num_kv_heads, keys=sizes["keys"],
                programs=units * PROGRAMS_PER_UNIT, smallest=LEAST_SPLIT,
            )  # fmt: skip
            options.append((seqs, (DECODE_ROWS, sizes["keys"], sizes["warps"]), split, False))
        if len(seqs := np.flatnonzero(~short)) or mixed:
            sizes = block_sizes("attention_prefill", shape)
            if library and flashinfer.wanted(sizes, kv):
                nothing = np.zeros((0, 4), np.int32)
                return [(Work(nothing, nothing), (0, 0, 0), True)]
            options.append((seqs, (sizes["rows"], sizes["keys"], sizes["warps"]), WHOLE, True))
    return [
        (
            cut_work(
                batch.cu_seqlens_q, batch.seq_lens, seqs, group=group, rows=rows, window=window,
                split=split // keys * keys, keys=keys,
            ),
            (rows, keys, warps),
            direct,
        )
        for seqs, (rows, keys, warps), split, direct in options
    ]  # fmt: skip


def num_units(device: torch.device) -> int:
    """Multiprocessors of the device; 1 in the interpreter, where there is nothing to fill."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _upload(array: npt.NDArray[np.int32], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def _run(
    q: torch.Tensor, kv: KvView, batch: DeviceBatch, shape: AttentionShape, sinks: torch.Tensor | None,
    out: torch.Tensor, work: DeviceWork,
) -> None:  # fmt: skip
    kv_heads, group = kv.num_kv_heads, shape.num_heads // kv.num_kv_heads
    num_items = work.items.shape[0]
    v_pad = _power_of_two(kv.v_head_dim)
    sums, tops = out, out  # not used where every tile is written directly
    if not work.direct:
        sums = torch.empty(num_items, kv_heads, work.rows, v_pad, dtype=torch.float32, device=q.device)
        tops = torch.empty(num_items, kv_heads, 2, work.rows, dtype=torch.float32, device=q.device)
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
        ROPE_PAD=_power_of_two(rope_dim), V_DIM=kv.v_head_dim, V_PAD=v_pad, BLOCK_SIZE=kv.block_size, ROWS=work.rows,
        KEYS=work.keys, V_IN_K=kv.v_in_k, SCALED=kv.scaled, CAPPED=shape.soft_cap is not None,
        WINDOWED=shape.window is not None, SINKS=sinks is not None, DIRECT=work.direct,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=work.num_warps,
    )  # fmt: skip
    if not work.direct:
        fold_items[(work.tiles.shape[0], kv_heads)](
            sums, tops, work.tiles, batch.cu_seqlens_q, out if sinks is None else sinks, out,
            GROUP=group, V_DIM=kv.v_head_dim, V_PAD=v_pad, ROWS=work.rows, SINKS=sinks is not None, num_warps=4,
        )  # fmt: skip


def _power_of_two(size: int) -> int:
    """At least 16, the least that a matrix unit takes."""
    return max(16, 1 << (size - 1).bit_length()) if size else 16
