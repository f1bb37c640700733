"""FlashInfer and flash-attn beside our rows: asked as their documentation says, and only where they are installed."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from benchmarks.gpu.other_attention import other_attention

CPU = torch.device("cpu")


def test_nothing_where_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flashinfer", "flash_attn"):
        monkeypatch.setitem(sys.modules, name, None)
    assert other_attention(2, 1, 40, 8, 2, 16, CPU) == {}


def test_what_is_installed_is_asked_in_its_own_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    class Wrapper:
        def __init__(self, workspace: torch.Tensor, layout: str) -> None:
            assert layout == "NHD"

        def plan(self, indptr, indices, last, heads, kv_heads, dim, page, **dtypes):  # type: ignore[no-untyped-def]
            assert indptr.tolist() == [0, 3, 6]
            assert sorted(indices.tolist()) == list(range(6))
            assert last.tolist() == [8, 8]
            assert (heads, kv_heads, dim, page) == (8, 2, 16, 16)

        def run(self, q: torch.Tensor, cache: torch.Tensor) -> None:
            asked.append((tuple(q.shape), tuple(cache.shape)))

    def prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> None:
        asked.append((tuple(q.shape), tuple(k.shape), tuple(v.shape), causal))

    fake = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper, single_prefill_with_kv_cache=prefill)
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=prefill))
    for shape in ((2, 1, 40, 8, 2, 16), (1, 30, 40, 8, 2, 16)):
        for call in other_attention(*shape, CPU).values():
            call()
    assert asked == [
        ((2, 8, 16), (6, 2, 16, 2, 16)),
        ((2, 1, 8, 16), (2, 40, 2, 16), (2, 40, 2, 16), True),
        ((30, 8, 16), (40, 2, 16), (40, 2, 16), True),
        ((1, 30, 8, 16), (1, 40, 2, 16), (1, 40, 2, 16), True),
    ]
