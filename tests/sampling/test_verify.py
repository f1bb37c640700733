"""Drafts change nothing but the number of steps: tokens, log-probabilities and errors are those of plain decoding."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tests.sampling.harness import Sampler
from tests.sampling.oracle import VOCAB, random_params
from tests.sampling.test_sampler import new_seq

from quire.request import SamplingParams, ThinkingBudget, TokenLogprobs
from quire.sampling.grammars import Grammars
from quire.sampling.processors import LogitsProcessors
from quire.step import NewSeq

Tokens = list[tuple[int, TokenLogprobs | None]]


def logits_at(seq: NewSeq, position: int, vocab: int) -> torch.Tensor:
    """What a model would say there, whatever the ids: then rejected drafts cannot be told by their logits."""
    generator = torch.Generator().manual_seed(seq.seq_id * 1000 + position)
    return torch.randn(vocab, generator=generator) * 3


def generate(
    seqs: list[NewSeq], steps: int, vocab: int, *, right: float | None, path: str = ""
) -> tuple[list[Tokens], list[str | None], int]:
    """Tokens and error of each sequence, and how many drafts were accepted. ``right``: share of them that are.

    None: no drafts. Drafts are what plain decoding gives, or a random id.
    """
    truth = generate(seqs, steps, vocab, right=None, path=path)[0] if right is not None else []
    rng = random.Random(17)
    sampler = Sampler(vocab, grammars=Grammars(path, vocab, 1))
    for seq in seqs:
        sampler.add(seq)
    found: list[Tokens] = [[] for _ in seqs]
    errors: list[str | None] = [None] * len(seqs)
    num_accepted = 0
    while True:
        going = [i for i in range(len(seqs)) if errors[i] is None and len(found[i]) < steps]
        going = [i for i in going if not found[i] or found[i][-1][0] not in seqs[i].sampling.eos_token_ids]
        if not going:
            return [tokens[:steps] for tokens in found], errors, num_accepted
        rows = []
        for i in going:
            drafts = []
            for j in range(rng.randint(0, 4) if right is not None else 0):
                place = len(found[i]) + j
                is_right = rng.random() < (right or 0.0) and place < len(truth[i])
                drafts.append(truth[i][place][0] if is_right else rng.randrange(vocab))
            if drafts:
                sampler.draft(seqs[i].seq_id, drafts)
            first = len(seqs[i].prompt_token_ids) + len(seqs[i].output_token_ids) + len(found[i]) - 1
            rows += [logits_at(seqs[i], first + j, vocab) for j in range(1 + len(drafts))]
        for i, sample in zip(
            going, sampler.sample(torch.stack(rows), [seqs[i].seq_id for i in going]), strict=True
        ):
            errors[i] = sample.error
            entries = sample.logprobs or (None,) * len(sample.token_ids)
            found[i] += zip(sample.token_ids, entries, strict=True)
            num_accepted += max(0, len(sample.token_ids) - 1)


@pytest.mark.parametrize("right", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_drafts_change_no_token_and_no_logprob(seed: int, right: float) -> None:
    rng = random.Random(500 + seed)
    seqs = []
    for seq_id in range(16):
        params = random_params(rng)
        if rng.random() < 0.3:
            budget = ThinkingBudget(rng.randint(0, 3), 8, 9, is_open=rng.random() < 0.7)
            allowed = params.allowed_token_ids
            params = replace(params, thinking_budget=budget, allowed_token_ids=allowed and (*allowed, 8, 9))
        output = tuple(rng.choices(range(VOCAB), k=rng.randint(0, 3)))
        seqs.append(new_seq(seq_id, params, output, index=rng.randint(0, 3)))
    plain = generate(seqs, 12, VOCAB, right=None)
    tokens, errors, num_accepted = generate(seqs, 12, VOCAB, right=right)
    assert tokens == plain[0], f"seed {seed}"
    assert errors == plain[1]
    assert num_accepted >= 40 * right


def test_a_row_that_fails_behind_accepted_drafts_fails_later() -> None:
    """Plain decoding gives the tokens before it first; a row behind a rejected draft does not matter."""
    params = SamplingParams(temperature=0.0, logprobs=1)
    sampler = Sampler(VOCAB)
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    best = logits.argmax(dim=1).tolist()
    logits[2] = torch.nan
    sampler.add(new_seq(0, params))
    sampler.draft(0, best[:3])
    (sample,) = sampler.sample(logits, [0])
    assert (sample.token_ids, sample.error) == (tuple(best[:2]), None)
    (sample,) = sampler.sample(logits[2:3], [0])
    assert "not finite" in str(sample.error)
    sampler.add(new_seq(0, params))
    sampler.draft(0, [best[0], best[1] + 1, best[3]])
    (sample,) = sampler.sample(logits, [0])
    assert (sample.token_ids, sample.error) == (tuple(best[:2]), None)


@pytest.mark.parametrize("seed", range(6))
def test_what_goes_back_was_never_there(seed: int) -> None:
    """Of every logits processor: advance and roll back, at random, and compare with one built from the ids left."""
    rng = random.Random(900 + seed)
    for _ in range(20):
        params = random_params(rng)
        if rng.random() < 0.4:
            params = replace(
                params, allowed_token_ids=None, thinking_budget=ThinkingBudget(rng.randint(0, 3), 8, 9, is_open=True)
            )  # fmt: skip
        new = new_seq(1, params, tuple(rng.choices(range(12), k=rng.randint(0, 4))))
        processors = LogitsProcessors(new, VOCAB)
        output = list(new.output_token_ids)
        for _ in range(8):
            for _ in range(rng.randint(0, 5)):
                output.append(rng.choice((*range(12), 200)))
                processors.advance(output[-1])
            count = rng.randint(0, len(output) - len(new.output_token_ids))
            processors.rollback(count)
            del output[len(output) - count :]
        rows = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)).repeat(2, 1)
        processors.edit(rows[0])
        LogitsProcessors(replace(new, output_token_ids=tuple(output)), VOCAB).edit(rows[1])
        assert torch.equal(rows[0], rows[1]), f"seed {seed}: {params}"
