"""What a prompt's rows give, bit for bit: in chunks, in a batch, after a preemption, and as its prefixes give it."""

from __future__ import annotations

import random

import pytest
import torch
from tests.kernels.checks import threads
from tests.runner.tiny import SEED, SPECS, VOCAB, Driver, engine_config, prompt_of

from quire.kernels import registry
from quire.kernels.registry import NATIVE_LEVELS
from quire.kernels.sampling.logprobs import token_logprobs
from quire.request import Pooling, SamplingParams, TokenLogprobs
from quire.step import NewSeq, SeqResult

SCORED = SamplingParams(temperature=0.0, seed=1, max_tokens=64, prompt_logprobs=3)
PROMPT = prompt_of(45)
LEVELS = ["reference", *(level for level in registry.backends("linear") if level in NATIVE_LEVELS)]


class Prompts(Driver):
    """A driver that asks for prompt outputs and keeps them."""

    def ask(self, seq_id: int, prompt: list[int], pooling: Pooling | None = None, epoch: int = 0) -> None:
        self.add(seq_id, prompt, epoch=epoch, sampling=SCORED)
        new: NewSeq = self._new.pop()
        fields = {"pooling": pooling, "prompt_logprobs": None if pooling else 3}
        self._new.append(NewSeq(seq_id, epoch, new.prompt_token_ids, (), SCORED, 0, **fields))  # type: ignore[arg-type]

    def run(self, *chunks: tuple[int, int]) -> dict[int, SeqResult]:
        return {item.seq_id: item for item in self.step(*chunks).seqs}


def whole(spec: str, level: str, pooling: Pooling | None = None) -> SeqResult:
    driver = Prompts(engine_config(SPECS[spec], "bfloat16", isa=level))
    driver.ask(0, PROMPT, pooling)
    return driver.run((0, len(PROMPT)))[0]


def in_chunks(spec: str, level: str, pooling: Pooling | None = None) -> list[SeqResult]:
    """Chunks of random sizes beside other sequences, some of which want outputs too, on one thread or two."""
    rng = random.Random(SEED)
    driver = Prompts(engine_config(SPECS[spec], "bfloat16", isa=level), shuffle=True)
    driver.add(1, prompt_of(60, 1))
    driver.ask(2, prompt_of(60, 2))
    driver.ask(0, PROMPT, pooling)
    results = []
    left = len(PROMPT)
    while left:
        rows = min(left, rng.choice((1, 4, 13)))
        with threads(rng.choice((1, 2))):
            results.append(driver.run((1, 2), (0, rows), (2, 3))[0])
        left -= rows
    return results


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("spec", SPECS)
def test_logprobs_in_chunks_equal_whole(spec: str, level: str) -> None:
    expected = whole(spec, level)
    assert expected.prompt_logprobs is not None
    assert [entry.token_id for entry in expected.prompt_logprobs] == PROMPT[1:]
    chunked = [e for r in in_chunks(spec, level) for e in r.prompt_logprobs or ()]
    assert tuple(chunked) == expected.prompt_logprobs


@pytest.mark.parametrize("kind", ["last", "mean", "logprobs"])
@pytest.mark.parametrize("spec", SPECS)
def test_pooled_in_chunks_equals_whole(spec: str, kind: str) -> None:
    pooling = Pooling(kind, (5, 77) if kind == "logprobs" else ())  # type: ignore[arg-type]
    for level in LEVELS:
        results = in_chunks(spec, level, pooling)
        assert [r.pooled for r in results[:-1]] == [None] * (len(results) - 1)
        assert results[-1].pooled == whole(spec, level, pooling).pooled
        assert all(r.token_ids == () for r in results), "nothing is drawn"


@pytest.mark.parametrize("spec", SPECS)
def test_each_row_gives_what_its_prefix_alone_gives(spec: str) -> None:
    """The oracle: the logits that sample after each prefix of the prompt, and its last hidden state."""
    level = LEVELS[-1]
    driver = Prompts(engine_config(SPECS[spec], "bfloat16", num_blocks=256, isa=level))
    entries: list[TokenLogprobs] = []
    pair: tuple[float, ...] = ()
    vectors = []
    for length in range(1, len(PROMPT) + 1):
        driver.add(length, PROMPT[:length])
        driver.ask(1000 + length, PROMPT[:length], Pooling("last"))
        result = driver.run((length, length), (1000 + length, length))
        vectors.append(torch.tensor(result[1000 + length].pooled, dtype=torch.float64))
        logits = driver.logits[length, length - 1][None]
        (drawn,) = token_logprobs(logits, torch.tensor([VOCAB - 1]), [0])
        pair = (token_logprobs(logits, torch.tensor([5]), [0])[0].logprob, drawn.logprob)
        if length < len(PROMPT):
            entries += token_logprobs(logits, torch.tensor([PROMPT[length]]), [3])
        driver.drop(length)
        driver.drop(1000 + length)
    assert whole(spec, level).prompt_logprobs == tuple(entries)
    assert whole(spec, level, Pooling("logprobs", (5, VOCAB - 1))).pooled == pair
    total = torch.zeros_like(vectors[0])
    for vector in vectors:
        total += vector
    assert whole(spec, level, Pooling("mean")).pooled == tuple((total / len(PROMPT)).tolist())


def test_a_preempted_prompt_starts_anew() -> None:
    driver = Prompts(engine_config(SPECS["llama"], "bfloat16"))
    driver.ask(0, PROMPT, Pooling("mean"))
    driver.run((0, 20))
    driver.drop(0)
    driver.ask(0, PROMPT, Pooling("mean"), epoch=1)
    driver.run((0, 7))
    assert driver.run((0, 38))[0].pooled == whole("llama", "reference", Pooling("mean")).pooled


def test_logits_of_a_long_prompt_exist_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.runner.prompt_outputs.SCRATCH_ELEMENTS", 4 * VOCAB)
    driver = Prompts(engine_config(SPECS["llama"], "bfloat16"))
    sizes: list[int] = []
    prompts = driver.executor.worker.scorer
    logits_of = prompts.logits_of
    prompts.logits_of = lambda hidden, slot: (sizes.append(len(hidden)), logits_of(hidden, slot))[1]
    driver.ask(0, PROMPT)
    result = driver.run((0, len(PROMPT)))[0]
    assert sizes == [4] * 11
    assert result.prompt_logprobs == whole("llama", "reference").prompt_logprobs


def test_logits_that_are_not_finite_fail_the_sequence_alone() -> None:
    driver = Prompts(engine_config(SPECS["llama"], "bfloat16"))
    prompts = driver.executor.worker.scorer
    logits_of = prompts.logits_of
    prompts.logits_of = lambda hidden, slot: logits_of(hidden, slot).fill_(float("nan"))
    driver.ask(0, PROMPT)
    driver.add(1, PROMPT)
    results = driver.run((0, 20), (1, len(PROMPT)))
    assert "not finite" in str(results[0].error)
    assert results[1].error is None
    assert len(results[1].token_ids) == 1
