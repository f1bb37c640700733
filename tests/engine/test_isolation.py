"""A fault in one request, of whatever part, fails that request alone: the others' tokens stay the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.integrity import check_integrity

import quire
from quire import LLM, SamplingParams
from quire.engine.results import RequestOutput
from quire.request import FinishReason
from quire.runner.worker import Worker
from quire.sampling import processors
from quire.sampling.grammars import Grammars
from quire.structured_outputs import StructuredOutputsParams

PROMPTS = ["Once upon a time", "The captain", "It was a dark night", "She said"]
FOLDER = Path(quire.__file__).parent / "models" / "quill_data" / "quill"  # without its weights
BAD = 2  # whose request is at fault
CHOICE = StructuredOutputsParams(regex="[a-z ]{30,40}")


def params(index: int, **fields: Any) -> SamplingParams:
    whole = {"ignore_eos": "structured_outputs" not in fields, **fields}
    return SamplingParams(max_tokens=12, seed=100 + index, temperature=0.9, logprobs=1, **whole)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(str(FOLDER), load_format="random", num_kv_blocks=128, max_model_len=256, threads=1)
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(llm: LLM) -> list[RequestOutput]:
    return llm.generate(PROMPTS, [params(i, logit_bias={5: 1.0}) for i in range(4)])


def core(llm: LLM) -> Any:
    return llm.client.core


def worker(llm: LLM) -> Worker:
    made: Worker = core(llm).executor.worker
    return made


def check_others(outputs: list[RequestOutput], undisturbed: list[RequestOutput]) -> str:
    """Assert that the others are equal to the last bit; return the error of the request at fault."""
    for index, (output, expected) in enumerate(zip(outputs, undisturbed, strict=True)):
        if index != BAD:
            assert output.outputs == expected.outputs
    assert outputs[BAD].outputs[0].finish_reason is FinishReason.ERROR
    return outputs[BAD].outputs[0].error or ""


def check_clean(llm: LLM) -> None:
    check_integrity(core(llm).scheduler)
    stats = core(llm).stats()
    assert stats.num_free_blocks + stats.num_idle_blocks == stats.num_blocks


class Raising(processors.LogitBias):
    """A logits processor that raises at its n-th call."""

    def __init__(self, where: str, count: int) -> None:
        super().__init__({5: 1.0})
        self._where, self._left = where, count

    def _maybe(self, where: str) -> None:
        self._left -= where == self._where
        if not self._left:
            raise IndexError("a bug in one processor")

    def apply(self, row: torch.Tensor) -> None:
        self._maybe("apply")
        super().apply(row)

    def advance(self, token_id: int) -> None:
        self._maybe("advance")


@pytest.mark.parametrize("where", ["apply", "advance", "build"])
def test_a_bad_processor_fails_its_request(
    llm: LLM, undisturbed: list[RequestOutput], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    real: Callable[..., Any] = processors.LogitsProcessors.__init__

    def build(self: Any, new: Any, vocab_size: int) -> None:
        real(self, new, vocab_size)
        if new.sampling.seed == 100 + BAD:
            if where == "build":
                raise KeyError("a bug")
            self._in_order = self._following = [Raising(where, 5)]

    monkeypatch.setattr(processors.LogitsProcessors, "__init__", build)
    error = check_others(
        llm.generate(PROMPTS, [params(i, logit_bias={5: 1.0}) for i in range(4)]), undisturbed
    )
    assert ("KeyError" if where == "build" else "IndexError: a bug in one processor") in error
    check_clean(llm)


class NotFinite:
    """A sampler that finds NaN in the row of one seed at one position, so many times."""

    def __init__(self, llm: LLM, times: int) -> None:
        self._inner, self.left = worker(llm).runner._sampler, times  # type: ignore[attr-defined]

    def sample(self, logits: torch.Tensor, columns: Any, *more: Any) -> Any:
        for row in np.flatnonzero((columns["seed"] == 100 + BAD) & (columns["position"] % 8 == 0)).tolist():
            if self.left:
                self.left -= 1
                logits[row, 7] = torch.nan
        return self._inner.sample(logits, columns, *more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_nan_once_is_computed_again(
    llm: LLM, undisturbed: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = core(llm).stats()
    monkeypatch.setattr(worker(llm).runner, "_sampler", NotFinite(llm, 1))
    outputs = llm.generate(PROMPTS, [params(i, logit_bias={5: 1.0}) for i in range(4)])
    assert [o.outputs for o in outputs] == [o.outputs for o in undisturbed]
    stats = core(llm).stats()
    assert stats.num_recomputed - before.num_recomputed == 1
    assert stats.num_recompute_failed == before.num_recompute_failed
    check_clean(llm)


def test_nan_twice_fails_the_request_and_is_counted(
    llm: LLM, undisturbed: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = core(llm).stats()
    monkeypatch.setattr(worker(llm).runner, "_sampler", NotFinite(llm, 2))
    error = check_others(
        llm.generate(PROMPTS, [params(i, logit_bias={5: 1.0}) for i in range(4)]), undisturbed
    )
    assert "not finite" in error
    stats = core(llm).stats()
    assert stats.num_recomputed - before.num_recomputed == 1
    assert stats.num_recompute_failed - before.num_recompute_failed == 1
    check_clean(llm)


def test_nan_in_a_cached_prefix_is_computed_afresh(llm: LLM) -> None:
    """Bad memory under blocks that others would read, too."""
    prompt, one = "word " * 40, SamplingParams(max_tokens=4, temperature=0.0)
    (good,) = llm.generate([prompt], one)
    worker(llm).runner.kv.storage[:] = float("nan")  # all that is cached
    outputs = llm.generate([prompt, prompt + " more"], one)
    assert outputs[0].outputs == good.outputs
    assert outputs[1].outputs[0].finish_reason is FinishReason.LENGTH
    assert core(llm).stats().num_recomputed > 0
    check_clean(llm)


def test_a_bad_grammar_state_fails_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panic while several sequences are advanced in one call does not tell which of them is at fault."""
    asked = [params(i, structured_outputs=CHOICE) for i in range(4)]
    undisturbed = llm.generate(PROMPTS, asked)
    real = Grammars._follow
    calls = [0]

    def follow(self: Grammars, moved: Any) -> None:
        calls[0] += 1
        if calls[0] > 3 and any(state.is_bad for state, _ in moved):
            raise RuntimeError("a panic in one grammar")
        real(self, moved)

    begin = Grammars.begin

    def marked(self: Grammars, new: Any) -> Any:
        state = begin(self, new)
        state.is_bad = new.sampling.seed == 100 + BAD  # type: ignore[attr-defined]
        return state

    monkeypatch.setattr(Grammars, "_follow", follow)
    monkeypatch.setattr(Grammars, "begin", marked)
    error = check_others(llm.generate(PROMPTS, asked), undisturbed)
    assert "a panic in one grammar" in error
    check_clean(llm)
