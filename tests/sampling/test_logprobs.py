"""Logprobs of the raw logits, ranks and alternatives, deterministic among equal logits."""

from __future__ import annotations

import pytest
import torch
from tests.sampling.harness import Sampler

from quire.kernels.sampling.logprobs import log_normalizer, logprob_tensors, token_logprobs
from quire.kernels.sampling.truncate import top_candidates
from quire.request import SamplingParams
from quire.step import NewSeq


def coarse_logits(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Logits with many equal values."""
    return torch.randint(-6, 6, (rows, vocab), generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("k", [1, 2, 7, 20, 61])
def test_top_candidates_are_exact_among_equal_scores(k: int) -> None:
    logits = coarse_logits(30, 61, k)
    values, ids = top_candidates(logits, k)
    for row in range(30):
        order = sorted(range(61), key=lambda i: (-float(logits[row, i]), i))[:k]
        assert ids[row].tolist() == order
        assert values[row].tolist() == logits[row, order].tolist()


def test_logprobs_equal_log_softmax() -> None:
    logits = torch.randn(20, 4001, generator=torch.Generator().manual_seed(0)) * 5
    expected = torch.log_softmax(logits.double(), dim=1)
    tokens = torch.arange(20) * 17
    found = token_logprobs(logits, tokens, [row % 6 for row in range(20)])
    for row, entry in enumerate(found):
        assert entry.token_id == int(tokens[row])
        assert entry.logprob == pytest.approx(float(expected[row, tokens[row]]), abs=2e-6)
        assert entry.rank == int((logits[row] > logits[row, tokens[row]]).sum()) + 1
        assert len(entry.top_token_ids) == len(entry.top_logprobs) == row % 6
        best = expected[row].topk(row % 6)
        assert list(entry.top_token_ids) == best.indices.tolist()
        assert list(entry.top_logprobs) == pytest.approx(best.values.tolist(), abs=2e-6)


def test_ranks_are_distinct_among_equal_logits() -> None:
    logits = coarse_logits(1, 40, 5)
    entries = [token_logprobs(logits, torch.tensor([i]), [20])[0] for i in range(40)]
    assert sorted(entry.rank for entry in entries) == list(range(1, 41))
    for entry in entries:
        if entry.rank <= 20:
            assert entry.top_token_ids[entry.rank - 1] == entry.token_id


@pytest.mark.parametrize("seed", range(5))
def test_masked_ids_are_named_by_id_whatever_the_batch(seed: int) -> None:
    """A grammar leaves few ids: those named behind them are the lowest of the others, alone and among other rows."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(16, 301, generator=generator)
    logits[:8].masked_fill_(torch.rand(8, 301, generator=generator) > 0.02, -torch.inf)
    logits[:, 7] = 0.0  # a row has at least one id
    tokens = torch.full((16,), 7)
    together = logprob_tensors(logits, tokens, 20)[2]
    for row in range(16):
        order = sorted(range(301), key=lambda i: (-float(logits[row, i]), i))[:20]
        assert together[row].tolist() == order
        assert logprob_tensors(logits[row : row + 1], tokens[:1], 20)[2][0].tolist() == order
        found = token_logprobs(logits[row : row + 1], tokens[:1], [20])[0]
        assert list(found.top_token_ids) == order, "the same at the level of this machine"


def test_normalizer_has_the_same_bits_alone_and_in_a_batch() -> None:
    logits = torch.randn(64, 3001, generator=torch.Generator().manual_seed(2)) * 4
    together = log_normalizer(logits)
    for row in range(64):
        assert torch.equal(log_normalizer(logits[row : row + 1].clone())[0], together[row])


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(
        temperature=0.2,
        seed=0,
        logprobs=3,
        allowed_token_ids=[9],
        logit_bias={9: 50.0},
        repetition_penalty=2.0,
    )
    sampler = Sampler(50)
    sampler.add(NewSeq(0, 0, (9,), (), params, 0))
    (sample,) = sampler.sample(logits, [0])
    expected = torch.log_softmax(logits[0].double(), dim=0)
    assert sample.token_ids[0] == 9
    assert sample.logprobs is not None
    (entry,) = sample.logprobs
    assert entry.logprob == pytest.approx(float(expected[9]), abs=1e-6)
    assert list(entry.top_token_ids) == expected.topk(3).indices.tolist()
