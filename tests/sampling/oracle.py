"""A naive sampler: one row, whole sorts, Python loops, from docs/sampling.md; and parameters to try it with."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from quire.kernels.sampling.noise import Streams, gumbel_noise
from quire.request import SamplingParams

VOCAB = 331


def random_params(rng: random.Random) -> SamplingParams:
    """Any combination of the features, each off more often than on."""
    options: dict[str, Any] = {
        "top_k": rng.choice([1, 5, 40, 1000]),
        "top_p": rng.choice([0.05, 0.5, 0.9, 0.999]),
        "min_p": rng.choice([0.02, 0.3]),
        "typical_p": rng.choice([0.1, 0.5, 0.95]),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.choice([0.7, 1.3]),
        "repeat_last_n": rng.choice([0, 1, 4, 11, 64]),
        "logit_bias": {rng.randrange(VOCAB): rng.uniform(-20, 20) for _ in range(5)},
        "allowed_token_ids": rng.sample(range(VOCAB), 60),
        "bad_words_token_ids": [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 2))] for _ in range(40)],
        "logprobs": rng.randint(0, 20),
    }
    chosen = {name: value for name, value in options.items() if rng.random() < 0.3}
    if rng.random() < 0.3:
        chosen |= {"min_tokens": 6, "eos_token_ids": (3, 4, VOCAB + 5), "stop_token_ids": (7,)}
    temperature = rng.choice([0.0, 0.0, 0.3, 1.0, 1.7])
    return SamplingParams(temperature=temperature, seed=rng.getrandbits(64) - 2**63, **chosen)


def edited(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """Bias, penalties and masks of one row, id by id."""
    x = logits.astype(np.float32).copy()
    if params.repeat_last_n is not None:
        begin = max(0, len(prompt) + len(output) - params.repeat_last_n)
        prompt, recent = prompt[begin:], output[max(0, begin - len(prompt)) :]
    else:
        recent = output
    counts = Counter(recent)
    for token_id in range(x.size):
        value = np.float32(x[token_id] + np.float32(params.logit_bias.get(token_id, 0.0)))
        if token_id in counts or token_id in prompt:
            r = np.float32(params.repetition_penalty)
            value = np.float32(value / r) if value > 0 else np.float32(value * r)
        if token_id in counts:
            penalty = np.float32(params.frequency_penalty) * np.float32(counts[token_id])
            value = np.float32(value - np.float32(penalty + np.float32(params.presence_penalty)))
        x[token_id] = value
        if params.allowed_token_ids is not None and token_id not in params.allowed_token_ids:
            x[token_id] = -np.inf
        if len(output) < params.min_tokens and token_id in (*params.eos_token_ids, *params.stop_token_ids):
            x[token_id] = -np.inf
        for word in params.bad_words_token_ids:
            if word[-1] == token_id and tuple(output)[len(output) - len(word) + 1 :] == word[:-1]:
                x[token_id] = -np.inf
    return x


def kept_ids(x: np.ndarray, params: SamplingParams) -> list[int]:
    """min_p, top_k, top_p over scaled scores by sorting everything."""
    order = sorted(range(x.size), key=lambda i: (-x[i], i))
    order = [
        i for i in order if x[i] > -np.inf and (params.typical_p == 1.0 or i in typical(x, params.typical_p))
    ]
    if params.min_p > 0.0:
        order = [i for i in order if float(x[i]) >= float(x[order[0]]) + math.log(params.min_p)]
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        mass = np.cumsum([math.exp(float(x[i]) - float(x[order[0]])) for i in order])
        order = order[: int(np.searchsorted(mass, params.top_p * mass[-1])) + 1]
    return order


@lru_cache
def _typical(scores: tuple[float, ...], typical_p: float) -> frozenset[int]:
    x = np.array(scores)
    p = np.exp(x) / np.exp(x).sum()
    surprise = -np.log(np.where(p > 0, p, 1.0))
    entropy = float((p * surprise).sum())
    order = sorted(np.flatnonzero(p > 0).tolist(), key=lambda i: (abs(surprise[i] - entropy), i))
    return frozenset(order[: int(np.searchsorted(np.cumsum(p[order]), typical_p)) + 1])


def typical(x: np.ndarray, typical_p: float) -> frozenset[int]:
    """The ids whose surprise is nearest to the entropy, by sorting everything."""
    return _typical(tuple((x - x.max()).tolist()), typical_p)


def draw(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    sample_index: int = 0,
) -> int:
    """The next token of one sequence."""
    x = edited(logits, params, prompt, output)
    if params.greedy:
        return int(np.argmax(x))
    x = (x - x.max()) / np.float32(params.temperature)
    ids = sorted(kept_ids(x, params))
    stream = Streams(
        torch.tensor([params.seed]), torch.tensor([sample_index]), torch.tensor([len(prompt) + len(output)])
    )
    noise = gumbel_noise(stream, torch.tensor([ids]))[0].numpy()
    return ids[int(np.argmax(x[ids].astype(np.float64) + noise))]
