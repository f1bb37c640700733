"""Attention of FlashInfer and flash-attn, where they are installed, at the shapes of our own rows.

Nothing installs them here.
Quire's engine does not use them: a table of measurements has to say first where they are faster (docs/gpu.md).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import torch

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
