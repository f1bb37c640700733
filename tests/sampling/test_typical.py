"""typical_p: the published example by hand, the number of candidates, the limits, and rows that stay exact."""

from __future__ import annotations

import math

import pytest
import torch
from tests.sampling.harness import Sampler

from quire.kernels.sampling.typical import typical_ids
from quire.request import SamplingParams
from quire.step import NewSeq


def test_a_likely_id_may_go_and_a_typical_one_stays() -> None:
    """H = 1.157: the surprises 0.51, 1.39, 2.30, 3.00 are 0.65, 0.23, 1.15, 1.84 away."""
    p = torch.tensor([0.60, 0.25, 0.10, 0.05])
    assert typical_ids(p.log(), 1.0, 0.2).tolist() == [1]
    assert typical_ids(p.log(), 1.0, 0.25 - 1e-6).tolist() == [1]
    assert typical_ids(p.log(), 1.0, 0.3).tolist() == [1, 0]
    assert typical_ids(p.log(), 1.0, 0.9).tolist() == [1, 0, 2]
    assert sorted(typical_ids(p.log(), 1.0, 1.0 - 1e-9).tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("typical_p", [0.01, 0.5, 0.9, 0.9999])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_the_number_of_candidates_changes_nothing(typical_p: float, temperature: float) -> None:
    logits = torch.randn(3001, generator=torch.Generator().manual_seed(5)) * 2
    logits[100:200] = -torch.inf
    expected = typical_ids(logits, temperature, typical_p, 3001)
    for num in (1, 7, 256):
        assert torch.equal(typical_ids(logits, temperature, typical_p, num), expected)
    assert not set(expected.tolist()) & set(range(100, 200))
    share = torch.softmax(logits.double() / temperature, 0)[expected]
    assert float(share.sum()) >= typical_p - 1e-6
    assert float(share[:-1].sum()) < typical_p + 1e-6


def test_equal_logits_keep_the_lowest_ids() -> None:
    assert typical_ids(torch.zeros(100), 1.0, 0.095, 3).tolist() == list(range(10))


def test_a_tiny_temperature_keeps_the_best_and_errors_are_the_samplers() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0])
    assert typical_ids(logits, 1e-30, 0.5).tolist() == [1]
    sampler = Sampler(3)
    for seq_id in range(3):
        params = SamplingParams(temperature=1e-45, typical_p=0.5, seed=1)
        sampler.add(NewSeq(seq_id, 0, (1,), (), params, 0))
    rows = torch.stack((logits, torch.full((3,), math.nan), logits))
    samples = sampler.sample(rows, [0, 1, 2])
    assert [s.token_ids for s in samples] == [(1,), (), (1,)]
    assert "not finite" in str(samples[1].error)
