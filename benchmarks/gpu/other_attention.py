"""Attention of FlashInfer and flash-attn, where they are installed, at the shapes of our own rows.

Nothing installs them here. The engine takes FlashInfer for prompts where the tuner says so
(`kernels.attention.flashinfer`), and not for decode: `over_our_blocks` shows whether it can read the engine's own cache
as it lies, and what it gives there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import numpy as np
import torch

from quire.kernels.attention.batch import AttentionShape, RaggedBatch
from quire.kernels.kv_blocks import KvView

PAGE = 16  # tokens of a block, as Quire's cache has it
Calls = dict[str, Callable[[], object]]


def other_attention(
    count: int, queries: int, length: int, heads: int, kv_heads: int, dim: int, device: torch.device
) -> Calls:
    """Name → call: ``count`` sequences of ``queries`` bf16 rows, the last of ``length`` positions, causal."""
    calls: Calls = {}
    flashinfer, flash_attn = _installed("flashinfer"), _installed("flash_attn")

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).bfloat16()

    if flashinfer is not None and queries == 1:
        calls["FlashInfer, pages"] = _paged_decode(flashinfer, count, length, heads, kv_heads, dim, rows)
    elif flashinfer is not None and count == 1:
        q, k, v = rows(queries, heads, dim), rows(length, kv_heads, dim), rows(length, kv_heads, dim)
        calls["FlashInfer"] = lambda: flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True)
    if flash_attn is not None:
        a, b, c = (
            rows(count, each, n, dim)
            for each, n in ((queries, heads), (length, kv_heads), (length, kv_heads))
        )
        calls["flash-attn over contiguous keys"] = lambda: flash_attn.flash_attn_func(a, b, c, causal=True)
    return calls


def over_our_blocks(q: torch.Tensor, kv: KvView, batch: RaggedBatch, shape: AttentionShape) -> Calls:
    """The same for a decode step over a cache of Quire's: one token of ``q [num_seqs, num_heads, head_dim]`` each.

    K and V are views of the blocks ``[blocks, kv_heads, block_size, dim]`` ("HND") with their strides, not copies.
    """
    flashinfer = _installed("flashinfer")
    if flashinfer is None or kv.scaled or kv.v_in_k or (np.diff(batch.cu_seqlens_q) != 1).any():
        return {}
    blocks = -(-batch.seq_lens // kv.block_size)
    indices = np.concatenate([row[:count] for row, count in zip(batch.block_table, blocks, strict=True)])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device=q.device), "HND"
    )
    wrapper.plan(
        *(torch.from_numpy(np.asarray(part, np.int32)) for part in (np.append(0, np.cumsum(blocks)), indices)),
        torch.from_numpy((batch.seq_lens - (blocks - 1) * kv.block_size).astype(np.int32)),
        shape.num_heads, kv.num_kv_heads, kv.head_dim, kv.block_size, window_left=(shape.window or 0) - 1,
        logits_soft_cap=shape.soft_cap, sm_scale=shape.scale, q_data_type=q.dtype, kv_data_type=q.dtype,
    )  # fmt: skip
    return {"FlashInfer, Quire's blocks": lambda: wrapper.run(q, (kv.keys, kv.values))}


def _paged_decode(
    flashinfer: ModuleType,
    count: int,
    length: int,
    heads: int,
    kv_heads: int,
    dim: int,
    rows: Callable[..., torch.Tensor],
) -> Callable[[], object]:
    pages = -(-length // PAGE)
    q, cache = rows(count, heads, dim), rows(count * pages, 2, PAGE, kv_heads, dim)
    device = q.device
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device=device), "NHD"
    )
    wrapper.plan(
        torch.arange(count + 1, dtype=torch.int32, device=device) * pages,
        torch.randperm(count * pages, device=device).int(),
        torch.full((count,), length - (pages - 1) * PAGE, dtype=torch.int32, device=device),
        heads, kv_heads, dim, PAGE, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    return lambda: wrapper.run(q, cache)


def _installed(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
