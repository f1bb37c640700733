"""FlashInfer's prefill, with a stand-in that follows its documentation: blocks, what is planned, and when."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType

import numpy as np
import pytest
import torch
from benchmarks.gpu import tune
from tests.kernels import cases
from tests.kernels.checks import assert_close
from tests.kernels.test_attention import oracle
from tests.kernels.triton.device import WARNINGS, on_device

from quire.kernels import block_sizes
from quire.kernels.attention import attention
from quire.kernels.attention.batch import LayerKind
from quire.kernels.attention.triton_plan import plan_works

pytestmark = WARNINGS
MIXED = ((30, 40), (1, 17), (1, 1), (20, 20))


class Wrapper:
    """`BatchPrefillWithPagedKVCacheWrapper` in torch."""

    num_plans = 0

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert layout == "HND"
        assert workspace.dtype == torch.uint8

    def plan(self, rows, indptr, indices, last, **more):  # type: ignore[no-untyped-def]
        assert {part.dtype for part in (rows, indptr, indices, last)} == {torch.int32}
        assert more["causal"]
        type(self).num_plans += 1
        self.more, self.rows, starts = more, rows.tolist(), indptr.tolist()
        self.pages = [indices[a:b].long() for a, b in pairwise(starts)]
        self.lengths = [
            (len(ids) - 1) * more["page_size"] + n for ids, n in zip(self.pages, last.tolist(), strict=True)
        ]

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        out = torch.empty_like(q)
        for i, (ids, length) in enumerate(zip(self.pages, self.lengths, strict=True)):
            mine = slice(self.rows[i], self.rows[i + 1])
            k, v = (part[ids.to(part.device)].transpose(0, 1).flatten(1, 2)[:, :length] for part in cache)
            k, v = (part.repeat_interleave(q.shape[1] // len(part), 0).double() for part in (k, v))
            scores = torch.einsum("thd,hnd->htn", q[mine].double(), k) * self.more["sm_scale"]
            cap, window = self.more["logits_soft_cap"], self.more["window_left"]
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            position = torch.arange(length, device=q.device)
            behind = position[-scores.shape[1] :, None] - position
            scores[:, (behind < 0) | ((behind > window) if window >= 0 else False)] = -torch.inf
            out[mine] = torch.einsum("htn,hnd->thd", scores.softmax(-1), v).to(q.dtype)
        return out


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, dict[str, int]]]:
    """FlashInfer, and this GPU's table, empty."""
    fake = ModuleType("flashinfer")
    fake.__spec__ = ModuleSpec("flashinfer", None)
    fake.BatchPrefillWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    table: dict[str, dict[str, dict[str, int]]] = {}
    monkeypatch.setattr(block_sizes, "sizes_table", lambda gpu: table)
    monkeypatch.setattr(Wrapper, "num_plans", 0)
    return table


def case_of(window: int | None = None, cap: float | None = None, **more: object) -> cases.AttentionCase:
    return cases.AttentionCase("mixed", MIXED, 8, 2, 64, 64, window=window, soft_cap=cap, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("window", "cap"), [(None, None), pytest.param(17, 20.0, marks=pytest.mark.slow)])
def test_only_where_the_table_says_so(
    installed: dict[str, dict[str, dict[str, int]]], window: int | None, cap: float | None
) -> None:
    here = cases.attention_inputs(case_of(window, cap), torch.bfloat16, torch.Generator().manual_seed(2))
    made = on_device(here)

    def result(backend: str = "triton") -> torch.Tensor:
        made.batch.plans.clear()
        for _ in range(2):  # two layers of one kind
            out = attention.on(backend)(made.q, made.kv, made.batch, made.shape, None)  # type: ignore[arg-type]
        assert_close("attention", out.cpu(), oracle(here))
        return out

    result()
    assert Wrapper.num_plans == 0
    sizes = block_sizes.DEFAULTS["attention_prefill"]
    installed["attention_prefill"] = {"d64_g4_b2": {**sizes, "flashinfer": 1}}
    result()
    assert Wrapper.num_plans == 1, "planned once a step and kind"
    result("invariant")
    assert Wrapper.num_plans == 1
    sys.modules["flashinfer"] = None  # type: ignore[assignment]
    result()
    assert Wrapper.num_plans == 1, "not installed"


def test_not_in_graphs_and_not_without_prompts(installed: dict[str, dict[str, dict[str, int]]]) -> None:
    installed["attention_prefill"] = {"all": {**block_sizes.DEFAULTS["attention_prefill"], "flashinfer": 1}}
    made = cases.attention_inputs(case_of(), torch.bfloat16, torch.Generator().manual_seed(2))

    def rows(mixed: bool, library: bool) -> list[int] | None:
        kind = LayerKind(4, None, made.kv)
        works = plan_works(made.batch, kind, units=1, invariant=False, mixed=mixed, library=library)
        return None if works is None else [work.shape.rows for work in works]

    assert rows(False, True) is None
    assert rows(True, False) == rows(False, False) == [16, block_sizes.DEFAULTS["attention_prefill"]["rows"]]
    made.batch.cu_seqlens_q[:] = np.arange(5)
    assert rows(False, True) == [16], "no prompt"


@pytest.mark.parametrize(
    ("error", "theirs_s", "written"), [(0.0, 1.0, 1), (0.0, 3.0, 0), (0.5, 1.0, 0), (None, 1.0, 0)]
)
def test_the_tuner_writes_it_where_it_is_right_and_faster(
    installed: dict[str, dict[str, dict[str, int]]],
    monkeypatch: pytest.MonkeyPatch,
    error: float | None,
    theirs_s: float,
    written: int,
) -> None:
    def asked() -> bool:
        return bool(installed["attention_prefill"]["all"].get("flashinfer"))

    def call() -> torch.Tensor:
        if asked() and error is None:
            raise TypeError("another version")
        return torch.full((2,), 1.0 + (error or 0.0) * asked())

    monkeypatch.setattr(tune, "seconds", lambda calls: theirs_s if asked() else 2.0)
    found = tune.with_flashinfer("attention_prefill", [call], {"rows": 64})
    assert found.get("flashinfer", 0) == written
