"""FlashInfer and flash-attn beside our rows: asked as their documentation says, and only where they are installed."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from benchmarks.gpu.other_attention import other_attention, over_our_blocks
from tests.kernels import cases

from quire.kernels.attention import attention

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


def test_our_pages_as_another_library_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that follows what FlashInfer documents of plan: HND pages, indptr, indices, the last page."""

    class Wrapper:
        def __init__(self, workspace: torch.Tensor, layout: str) -> None:
            assert layout == "HND"

        def plan(self, indptr, indices, last, heads, kv_heads, dim, page, **more):  # type: ignore[no-untyped-def]
            assert {part.dtype for part in (indptr, indices, last)} == {torch.int32}
            self.window, self.cap, self.scale = (
                more[name] for name in ("window_left", "logits_soft_cap", "sm_scale")
            )
            self.pages = [
                indices[a:b].long() for a, b in zip(indptr.tolist(), indptr.tolist()[1:], strict=False)
            ]
            self.lengths = [(len(ids) - 1) * page + int(n) for ids, n in zip(self.pages, last, strict=True)]

        def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            rows = []
            for one, ids, length in zip(q, self.pages, self.lengths, strict=True):
                k, v = (part[ids].transpose(0, 1).flatten(1, 2)[:, :length] for part in cache)
                k, v = (part.repeat_interleave(len(one) // len(k), 0) for part in (k, v))
                scores = torch.einsum("hd,hnd->hn", one, k) * self.scale
                if self.cap is not None:
                    scores = self.cap * torch.tanh(scores / self.cap)
                if self.window >= 0:
                    scores[:, : max(0, length - 1 - self.window)] = -torch.inf
                rows.append(torch.einsum("hn,hnd->hd", scores.softmax(-1), v))
            return torch.stack(rows)

    monkeypatch.setitem(
        sys.modules, "flashinfer", SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper)
    )
    for window, cap in ((None, None), (17, 20.0)):
        lengths = ((1, 40), (1, 1), (1, 16), (1, 33))
        case = cases.AttentionCase("decode", lengths, 8, 2, 16, 16, window=window, soft_cap=cap)
        made = cases.attention_inputs(case, torch.float32, torch.Generator().manual_seed(3))
        (call,) = over_our_blocks(made.q, made.kv, made.batch, made.shape).values()
        expected = attention.on("reference")(made.q, made.kv, made.batch, made.shape, None)
        assert torch.allclose(call(), expected, atol=1e-4)  # type: ignore[arg-type]
        mixed = cases.attention_inputs(
            cases.AttentionCase("m", ((2, 9),), 8, 2, 16, 16), torch.float32, torch.Generator()
        )
        assert over_our_blocks(mixed.q, mixed.kv, mixed.batch, mixed.shape) == {}
