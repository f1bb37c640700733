"""Thinking budgets through the whole engine: exact to the token, with the tokens of the request run alone."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.request import ThinkingBudget
from quire.text.constraint import ThinkingLimit

pytestmark = pytest.mark.system

BEGIN, END = 300, 301  # any two ids will do; Quill samples neither in these runs


def allowed_next(limit: ThinkingLimit, vocab_size: int = 12) -> set[int]:
    allowed = np.ones(vocab_size, np.bool_)
    limit.mask(allowed)
    return set(np.flatnonzero(allowed).tolist())


@pytest.mark.parametrize("seed", range(20))
def test_the_limit_is_a_function_of_the_ids(seed: int) -> None:
    """Rolled back or rebuilt, it forbids the same ids; reasoning never exceeds the budget."""
    rng = random.Random(seed)
    budget = ThinkingBudget(rng.randint(0, 4), 1, 2, is_open=rng.random() < 0.5)
    limit, ids = ThinkingLimit(budget), list[int]()
    everything = set(range(12))
    for _ in range(60):
        inside, count = budget.is_open, 0
        for token_id in ids:
            if inside and token_id == 2:
                inside = False
            elif inside:
                count += 1
            else:
                inside = token_id == 1
        assert count <= budget.num_tokens
        assert allowed_next(limit) == ({2} if inside and count == budget.num_tokens else everything)
        if ids and rng.random() < 0.3:
            num_back = rng.randint(1, len(ids))
            limit.rollback(num_back)
            del ids[-num_back:]
            continue
        token_id = rng.choice(sorted(allowed_next(limit)))
        limit.advance(token_id)
        ids.append(token_id)
        rebuilt = ThinkingLimit(budget)
        for one in ids:
            rebuilt.advance(one)
        assert allowed_next(rebuilt) == allowed_next(limit)


def test_tokens_in_a_batch_preempted_and_forked_are_those_alone() -> None:
    prompts = [f"Chapter {i}. In the harbour there lay " + "a ship and " * i for i in range(6)]
    sampling = [
        SamplingParams(max_tokens=50, seed=i, temperature=1.0, n=2, logprobs=1, ignore_eos=True,
                       thinking_budget=ThinkingBudget(5 * i, BEGIN, END, is_open=True))
        for i in range(6)
    ]  # fmt: skip
    with LLM("quill", num_kv_blocks=256, max_model_len=192, threads=1) as llm:
        alone = [llm.generate(p, s, use_tqdm=False)[0] for p, s in zip(prompts, sampling, strict=True)]
    with LLM("quill", num_kv_blocks=24, max_model_len=192, max_num_batched_tokens=48, threads=1) as small:
        together = small.generate(prompts, sampling, use_tqdm=False)
        assert small.client.stats().num_preemptions > 3, "the point of this test"
    for i, (one, other) in enumerate(zip(alone, together, strict=True)):
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert a.token_ids == b.token_ids
            assert a.logprobs == b.logprobs
            assert a.token_ids.index(END) <= 5 * i
