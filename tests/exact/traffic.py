"""Seeded random traffic: shared prefixes, repeated prompts, n, priorities, salts, every sampling feature, aborts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from quire.request import Adapter, Request, SamplingParams, Terms

STEP_S = 0.01  # the virtual time of one step


@dataclass(frozen=True, slots=True)
class Job:
    """A request, and when its client goes away (in steps after its arrival; None: it stays)."""

    request: Request
    abort_after_steps: int | None


def make_jobs(
    seed: int,
    num_jobs: int,
    vocab: int,
    eos: int,
    *,
    max_prompt: int,
    max_output: int,
    adapters: tuple[Adapter, ...] = (),
) -> list[Job]:
    """``num_jobs`` requests in order of arrival. Seeds are distinct, so (seed, sample_index) names a sequence.

    Each has one of ``adapters`` or none.
    """
    rng, which = random.Random(seed), random.Random(seed)
    prefixes = [_ids(rng, vocab, rng.randint(max_prompt // 3, max_prompt * 4 // 5)) for _ in range(2)]
    jobs: list[Job] = []
    now_s = 0.0
    for index in range(num_jobs):
        now_s += rng.choice([0.0, 0.0, 1.0, 3.0]) * STEP_S
        request = Request(
            request_id=f"r{index}",
            prompt_token_ids=_prompt(rng, vocab, prefixes, jobs, max_prompt),
            sampling=_sampling(rng, vocab, eos, max_output, seed * 10_000 + index),
            arrival_s=now_s,
            terms=Terms(priority=rng.randint(0, 3), cache_salt="" if rng.random() < 0.85 else "tenant-b"),
            adapter=which.choice((None, *adapters)),
        )
        jobs.append(Job(request, rng.randint(1, 25) if rng.random() < 0.12 else None))
    return jobs


def _ids(rng: random.Random, vocab: int, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(3, vocab) for _ in range(count))


def _prompt(
    rng: random.Random, vocab: int, prefixes: list[tuple[int, ...]], jobs: list[Job], max_prompt: int
) -> tuple[int, ...]:
    kind = rng.random()
    if kind < 0.3 and jobs:  # a prompt seen before: a full hit
        return rng.choice(jobs).request.prompt_token_ids
    if kind < 0.9:
        prefix = rng.choice(prefixes)
        return prefix + _ids(rng, vocab, rng.randint(1, max_prompt - len(prefix)))
    return _ids(rng, vocab, rng.randint(1, max_prompt))


def _sampling(
    rng: random.Random, vocab: int, eos: tuple[int, ...], max_output: int, seed: int
) -> SamplingParams:
    features: dict[str, Any] = {
        "top_k": rng.choice([3, 40]),
        "top_p": rng.choice([0.5, 0.95]),
        "min_p": 0.05,
        "typical_p": rng.choice([0.3, 0.9]),
        "presence_penalty": rng.uniform(-1, 1.5),
        "frequency_penalty": rng.uniform(-1, 1.5),
        "repetition_penalty": 1.3,
        "logit_bias": {rng.randrange(vocab): rng.uniform(-5, 5) for _ in range(3)},
        "bad_words_token_ids": [[rng.randrange(vocab) for _ in range(rng.randint(1, 2))] for _ in range(8)],
        "allowed_token_ids": rng.sample(range(vocab), vocab // 2),
        "logprobs": rng.choice([0, 4]),
        "prompt_logprobs": rng.choice([0, 2]),
    }
    chosen = {name: value for name, value in features.items() if rng.random() < 0.12}
    if rng.random() < 0.4:
        chosen["stop_token_ids"] = rng.sample(range(vocab), vocab // 12)
    max_tokens = rng.choice([1, rng.randint(2, 6), rng.randint(max_output // 2, max_output)])
    return SamplingParams(
        n=rng.choice([1, 1, 1, 1, 1, 1, 2, 3]),
        temperature=rng.choice([0.0, 0.0, 0.6, 1.0]),
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, 0, min(3, max_tokens)]),
        eos_token_ids=eos,
        **chosen,
    )
