"""The sampler against the naive oracle, its independence of the batch, and rebuilt state against continued state."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.sampling import oracle
from tests.sampling.harness import Sampler
from tests.sampling.oracle import VOCAB, random_params

from quire.request import SamplingParams
from quire.sampling.sampler import SeqSample
from quire.step import NewSeq


def new_seq(
    seq_id: int, params: SamplingParams, output: tuple[int, ...] = (), index: int = 0, prompt_len: int = 9
) -> NewSeq:
    prompt = tuple(random.Random(seq_id).choices(range(VOCAB), k=prompt_len))
    return NewSeq(seq_id, 0, prompt, output, params, index)


def logits_of(step: int, rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1000 + step)
    logits = torch.randn(rows, VOCAB, generator=generator) * 3
    return logits.to(torch.bfloat16).to(torch.float32) if step % 2 else logits  # equal logits happen


@pytest.mark.parametrize("seed", range(4))
def test_sampler_equals_the_naive_oracle(seed: int) -> None:
    rng = random.Random(seed)
    params = [random_params(rng) for _ in range(40)]
    seqs = [new_seq(i, p, index=i % 5) for i, p in enumerate(params)]
    outputs: list[list[int]] = [[] for _ in seqs]
    sampler = Sampler(VOCAB)
    for seq in seqs:
        sampler.add(seq)
    for step in range(8):
        logits = logits_of(step, len(seqs), seed)
        kept = logits.clone()
        drawn = sampler.sample(logits, [seq.seq_id for seq in seqs])
        assert torch.equal(logits, kept), "the caller's logits were changed"
        for row, seq in enumerate(seqs):
            expected = oracle.draw(
                logits[row].numpy(), params[row], seq.prompt_token_ids, outputs[row], seq.sample_index
            )
            assert drawn[row].token_ids[0] == expected, f"seed {seed}, step {step}, {params[row]}"
            assert (drawn[row].logprobs is None) == (params[row].logprobs is None)
            outputs[row].append(expected)


@pytest.mark.parametrize("seed", range(3))
def test_alone_in_a_batch_and_rebuilt_give_the_same_samples(seed: int) -> None:
    """Three lives of each sequence: always alone; in changing batches; rebuilt from its ids before every draw."""
    rng = random.Random(100 + seed)
    params = [random_params(rng) for _ in range(24)]
    together = Sampler(VOCAB)
    alone = [Sampler(VOCAB) for _ in params]
    outputs: list[tuple[int, ...]] = [() for _ in params]
    for row, p in enumerate(params):
        together.add(new_seq(row, p, index=row))
        alone[row].add(new_seq(row, p, index=row))
    for step in range(10):
        rows = rng.sample(range(len(params)), rng.randint(1, len(params)))
        logits = logits_of(step, len(params), seed)
        batch = together.sample(logits[rows], rows)
        for row, sample in zip(rows, batch, strict=True):
            single = alone[row].sample(logits[row : row + 1], [row])[0]
            rebuilt = Sampler(VOCAB)
            rebuilt.add(new_seq(row, params[row], outputs[row], index=row))
            again = rebuilt.sample(logits[row : row + 1], [row])[0]
            assert sample == single == again, f"seed {seed}, step {step}, {params[row]}"
            outputs[row] += sample.token_ids
        for row in rng.sample(rows, len(rows) // 3):  # preempted and admitted again
            together.remove(row)
            together.add(new_seq(row, params[row], outputs[row], index=row))


def test_samples_do_not_depend_on_the_number_of_threads() -> None:
    rng = random.Random(5)
    params = [random_params(rng) for _ in range(16)]
    logits = torch.randn(16, 50_021, generator=torch.Generator().manual_seed(3)) * 3
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            sampler = Sampler(50_021)
            for row, p in enumerate(params):
                sampler.add(new_seq(row, p))
            results.append(sampler.sample(logits, range(16)))
    finally:
        torch.set_num_threads(threads)
    assert results[0] == results[1] == results[2]


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    sampler = Sampler(VOCAB)
    sampler.add(new_seq(0, SamplingParams(temperature=0.0)))
    sampler.add(new_seq(1, SamplingParams(temperature=0.0, logit_bias={200: 1.0, 40: 1.0})))
    logits = torch.zeros(2, VOCAB)
    logits[:, [77, 300]] = 0.5
    assert [s.token_ids[0] for s in sampler.sample(logits, [0, 1])] == [77, 40]


@pytest.mark.parametrize(
    ("options", "seed"), [({}, 1), ({"top_k": 6}, 2), ({"top_p": 0.8}, 3), ({"min_p": 0.1, "top_p": 0.9}, 4)]
)
def test_samples_follow_the_distribution(options: dict[str, Any], seed: int) -> None:
    """Chi-square over 24,000 draws (every position and many seeds); 99.9 % quantile by Wilson and Hilferty."""
    vocab, draws, rows = 16, 24_000, 400
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 1.5
    scaled = ((logits - logits.max()) / np.float32(0.8)).numpy()
    params = SamplingParams(temperature=0.8, seed=0, **options)
    ids = oracle.kept_ids(scaled, params)
    weights = np.exp(scaled[ids].astype(np.float64))
    sampler = Sampler(vocab)
    for row in range(rows):
        sampler.add(NewSeq(row, 0, (1, 2), (), SamplingParams(temperature=0.8, seed=row, **options), 0))
    counts = np.zeros(vocab)
    for _ in range(draws // rows):
        for sample in sampler.sample(logits.expand(rows, vocab), range(rows)):
            counts[sample.token_ids[0]] += 1
    expected = draws * weights / weights.sum()
    assert counts.sum() == counts[ids].sum()
    statistic = float(((counts[ids] - expected) ** 2 / expected).sum())
    freedom = len(ids) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < limit, f"seed {seed}: chi-square {statistic:.1f} with {freedom} degrees of freedom"


def test_n_samples_of_one_seed_differ_and_are_each_reproducible() -> None:
    def texts(indices: list[int]) -> dict[int, list[int]]:
        sampler = Sampler(VOCAB)
        for index in indices:
            seq = new_seq(0, SamplingParams(seed=42), index=index)
            sampler.add(NewSeq(index, 0, seq.prompt_token_ids, (), seq.sampling, index))
        drawn: dict[int, list[int]] = {index: [] for index in indices}
        for _ in range(6):
            for index, sample in zip(
                indices, sampler.sample(torch.zeros(len(indices), VOCAB), indices), strict=True
            ):
                drawn[index].append(sample.token_ids[0])
        return drawn

    four = texts([0, 1, 2, 3])
    assert len({tuple(ids) for ids in four.values()}) == 4
    for index in range(4):
        assert texts([index]) == {index: four[index]}


def test_extreme_temperatures() -> None:
    sampler = Sampler(VOCAB)
    for row, temperature in enumerate((1e-300, 1e-30, 100.0)):
        sampler.add(new_seq(row, SamplingParams(temperature=temperature, seed=1, top_p=0.9 if row else 1.0)))
    logits = logits_of(0, 3, 9) * 1e6
    samples = sampler.sample(logits, [0, 1, 2])
    assert [s.token_ids[0] for s in samples[:2]] == logits[:2].argmax(dim=1).tolist()
    assert samples[2].error is None


def test_a_row_without_a_choice_fails_alone() -> None:
    sampler = Sampler(VOCAB)
    sampler.add(new_seq(0, SamplingParams(seed=3, logprobs=2)))
    sampler.add(new_seq(1, SamplingParams(seed=3, allowed_token_ids=[5], bad_words_token_ids=[[5]])))
    sampler.add(new_seq(2, SamplingParams(temperature=0.0)))
    sampler.add(new_seq(3, SamplingParams(temperature=0.0)))
    logits = logits_of(0, 4, 1)
    logits[3, 100] = torch.nan
    samples = sampler.sample(logits, [0, 1, 2, 3])
    assert [s.error is None for s in samples] == [True, False, True, False]
    assert "forbid every id" in str(samples[1].error)
    assert "NaN" in str(samples[3].error)
    reference = Sampler(VOCAB)
    reference.add(new_seq(0, SamplingParams(seed=3, logprobs=2)))
    assert [samples[0]] == reference.sample(logits[:1], [0])
    assert isinstance(samples[2], SeqSample)
