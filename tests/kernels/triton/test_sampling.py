"""Sampling on a GPU gives the reference's tokens: the same noise, the same comparisons."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.kernels.checks import generator
from tests.kernels.triton.device import DEVICE, WARNINGS

from quire.kernels.registry import Backend
from quire.kernels.sampling import COLUMNS, MIN_P, RANDOM, TRUNCATED, sample
from quire.kernels.sampling import triton as on_gpu
from quire.kernels.sampling.truncate import lowest_of_equals, top_candidates

pytestmark = WARNINGS


def columns_of(rows: int, vocab: int, *, truncated: bool) -> np.ndarray:
    rng = np.random.default_rng(20261121)
    columns = np.zeros(rows, COLUMNS)
    columns["features"] = rng.choice([0, RANDOM, RANDOM, RANDOM | MIN_P], rows)
    columns["temperature"] = rng.choice([0.01, 0.7, 1.0, 3.0], rows)
    columns["top_k"], columns["top_p"] = vocab, 1.0
    columns["min_p"] = np.where(columns["features"] & MIN_P, 0.05, 0.0)
    columns["seed"] = rng.integers(-(2**63), 2**63, rows)
    columns["sample_index"] = rng.integers(0, 5, rows)
    columns["position"] = rng.integers(0, 100_000, rows)
    if truncated:
        columns["features"] |= RANDOM | TRUNCATED
        columns["top_k"] = rng.choice([1, 5, vocab], rows)
        columns["top_p"] = rng.choice([0.5, 0.9, 1.0], rows)
    return columns


def sampled(logits: torch.Tensor, columns: np.ndarray, backend: Backend) -> tuple[list[int], np.ndarray]:
    if backend == "reference":
        ids, best = sample.on(backend)(logits, {}, columns, purpose=0)
        return ids.tolist(), best
    facts = torch.from_numpy(on_gpu.facts_of(columns)).to(DEVICE)
    made = on_gpu.sample_rows(logits.to(DEVICE), facts, 0, cut=on_gpu.truncated(columns))
    return made[0].tolist(), made[1].cpu().numpy()


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (5, 131), (8, 3001), (2, 1024)])
def test_tokens_are_the_references(rows: int, vocab: int, truncated: bool) -> None:
    logits = torch.randn(rows, vocab, generator=generator()) * 3
    logits[0, : vocab // 2] = 2.5  # ties go to the lowest id
    if rows > 1:
        logits[1, ::2] = -torch.inf
    columns = columns_of(rows, vocab, truncated=truncated)
    expected, made = sampled(logits, columns, "reference"), sampled(logits, columns, "triton")
    assert made[0] == expected[0]
    assert np.array_equal(made[1], expected[1])


@pytest.mark.parametrize("k", [1, 3, 40, 131])
def test_the_best_ids_without_waiting(k: int) -> None:
    """What a GPU takes where a CPU loops over rows whose last place several ids share."""
    scores = (torch.randn(6, 131, generator=generator()) * 2).round()
    scores[0] = 1.0
    kth = torch.topk(scores, k, dim=1).values[:, -1:]
    _, expected = top_candidates(scores, k)
    assert torch.equal(lowest_of_equals(scores, kth, k), expected.sort(dim=1).values)


@pytest.mark.slow
@pytest.mark.parametrize("candidates", [2, 16, 1024])
def test_a_nucleus_larger_than_the_candidates(candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such rows are found on the device and look at the whole vocabulary; equal scores at the edge, too."""
    monkeypatch.setattr(on_gpu, "CANDIDATES", candidates)
    logits = (torch.randn(9, 1500, generator=generator()) * 2).round()
    columns = columns_of(9, 1500, truncated=True)
    columns["top_k"] = [1, 3, 20, 300, 1500, 1500, 1500, 1400, 7]
    columns["top_p"] = [1.0, 0.9, 0.3, 1.0, 0.9, 0.999, 0.01, 0.7, 1.0]
    for position in range(2):
        columns["position"] = position
        assert sampled(logits, columns, "triton")[0] == sampled(logits, columns, "reference")[0]


def test_rows_that_cannot_be_sampled_say_so() -> None:
    logits = torch.randn(4, 2000, generator=generator())
    logits[1, 1500] = torch.nan
    logits[2] = -torch.inf
    columns = columns_of(4, 2000, truncated=False)
    ids, best = sampled(logits, columns, "triton")
    assert np.isfinite(best).tolist() == [True, False, False, True]
    expected = sampled(logits, columns, "reference")[0]
    assert [ids[0], ids[3]] == [expected[0], expected[3]]
