"""Structured output through the whole engine: answers have the form, and their tokens equal those of the request run
alone.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.errors import RequestError
from quire.request import FinishReason, TokenEvent
from quire.text import grammar_matcher

pytestmark = pytest.mark.system

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["sea", "wind", "ships"]}, "maxItems": 4},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
SAILS = ["jib", "main", "mizzen", "top"]
WATCHED = {
    "type": "array",
    "items": {"enum": SAILS},
    "uniqueItems": True,
    "minItems": 3,
    "contains": {"const": "top"},
}
FORMS: dict[str, StructuredOutputsParams] = {
    "json": StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    "regex": StructuredOutputsParams(regex=r"[A-Z][a-z]{3,9} [A-Z][a-z]{3,9}, \d{1,3} years"),
    "choice": StructuredOutputsParams(choice=["the captain", "the captain's wife", "nobody"]),
    "watched": StructuredOutputsParams(json=WATCHED, disable_any_whitespace=True),
    "grammar": StructuredOutputsParams(grammar='root ::= word ("," word){3,12}\nword ::= [a-z]{2,9}'),
}
WORD = "[a-z]{2,9}"


def fits(kind: str, text: str) -> bool:
    if kind == "json":
        value = json.loads(text)
        return (
            set(value) == {"name", "age", "likes"} and 0 <= value["age"] <= 120 and len(value["name"]) <= 24
        )
    if kind == "watched":
        items = json.loads(text)
        return 3 <= len(items) == len(set(items)) and "top" in items and set(items) <= set(SAILS)
    patterns = {
        "regex": r"[A-Z][a-z]{3,9} [A-Z][a-z]{3,9}, \d{1,3} years",
        "choice": "the captain|the captain's wife|nobody",
        "grammar": f"{WORD}(,{WORD}){{3,12}}",
    }
    return re.fullmatch(patterns[kind], text) is not None


def params(kind: str, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "seed": 5, "structured_outputs": FORMS[kind], **fields})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("quill", num_kv_blocks=256, max_model_len=256, threads=1) as made:
        yield made


def key(output: RequestOutput) -> list[object]:
    return [(o.index, o.text, o.token_ids, o.finish_reason, o.logprobs) for o in output.outputs]


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_form_holds(llm: LLM, kind: str, temperature: float) -> None:
    sampling = params(kind, temperature=temperature, n=3 if temperature else 1, logprobs=3)
    (output,) = llm.generate("The captain said: ", sampling, use_tqdm=False)
    eos = set(llm.model.eos_token_ids)
    for one in output.outputs:
        assert one.finish_reason is FinishReason.STOP, one
        assert fits(kind, one.text), one.text
        assert one.token_ids[-1] in eos
        assert not set(one.token_ids[:-1]) & eos


def test_tokens_in_a_batch_preempted_and_forked_are_those_alone(llm: LLM) -> None:
    """In 24 blocks, eight requests of three samples preempt one another; each is rebuilt from its output ids."""
    kinds = [*FORMS, None, "json", "grammar", "json"]
    sampling = [
        params(kind, seed=i, temperature=1.0, n=3, logprobs=2)
        if kind
        else SamplingParams(max_tokens=60, seed=i, n=3, logprobs=2)
        for i, kind in enumerate(kinds)
    ]
    prompts = [f"Chapter {i}. In the harbour there lay " + "a ship and " * i for i in range(len(kinds))]
    with LLM("quill", num_kv_blocks=24, max_model_len=192, max_num_batched_tokens=48, threads=1) as small:
        together = small.generate(prompts, sampling, use_tqdm=False)
        assert small.client.stats().num_preemptions > 3, "the point of this test"
    for i, output in enumerate(together):
        (alone,) = llm.generate(prompts[i], sampling[i], use_tqdm=False)
        assert key(alone) == key(output), i


def test_a_sequence_goes_on_after_a_restart(llm: LLM) -> None:
    """A new engine continues the same answer from (prompt ids, output ids, grammar)."""
    sampling = params("json", temperature=1.0)
    (whole,) = llm.generate("A sailor: ", sampling, use_tqdm=False)
    ids = whole.outputs[0].token_ids
    for cut in (1, len(ids) // 2, len(ids) - 1):
        request = llm._request(list(whole.prompt_token_ids), sampling)
        assert not hasattr(request.sampling, "structured_outputs")
        assert request.grammar is not None
        llm.client.send(replace(request, output_token_ids=(ids[:cut],)))
        rest: list[int] = []
        while len(rest) < len(ids) - cut:
            for event in llm.client.receive():
                rest.extend(event.token_ids)
        assert (*ids[:cut], *rest) == ids, cut


def test_log_probabilities_are_those_of_what_the_grammar_allows(llm: LLM) -> None:
    (output,) = llm.generate("It was ", params("choice", temperature=0.0, logprobs=5), use_tqdm=False)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    sampled = [entry[token_id] for entry, token_id in zip(logprobs, output.outputs[0].token_ids, strict=True)]
    assert any(one.logprob == 0.0 for one in sampled), "a token that is the only one allowed is certain"
    assert all(one.rank == 1 for one in sampled)
    for entry in logprobs:
        assert sum(math.exp(one.logprob) for one in entry.values()) < 1.0001


def test_a_limit_hit_in_a_step_fails_that_sequence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grammar_matcher.LIMITS, "step_max_items", 60)  # the worker is in this process
    hard = StructuredOutputsParams(grammar='start: a\na: "x" | a a | a a a')
    free = SamplingParams(max_tokens=30, temperature=0.0)
    with LLM("quill", num_kv_blocks=64, max_model_len=256, threads=1) as small:
        receive, kinds = small.client.receive, set()

        def watched(timeout_s: float | None = None) -> list[TokenEvent]:
            events = receive(timeout_s)
            kinds.update(event.error_kind for event in events if event.error_kind is not None)
            return events

        monkeypatch.setattr(small.client, "receive", watched)
        (alone,) = small.generate("The sea", free, use_tqdm=False)
        outputs = small.generate(
            ["The sea", "x", "The sea"],
            [free, SamplingParams(max_tokens=30, min_tokens=29, structured_outputs=hard), params("choice")],
            use_tqdm=False,
        )
    assert key(outputs[0]) == key(alone)
    assert outputs[1].outputs[0].finish_reason is FinishReason.ERROR
    assert "structured_outputs" in (outputs[1].outputs[0].error or ""), outputs[1]
    assert kinds == {"request"}, "a 400: the client asked for the grammar"
    assert outputs[2].outputs[0].finish_reason is FinishReason.STOP


def test_refusals_before_anything_runs(llm: LLM) -> None:
    wrong = SamplingParams(
        structured_outputs=StructuredOutputsParams(json={"not": {"type": "array"}, "unevaluatedItems": False})
    )
    with pytest.raises(RequestError, match="unevaluatedItems"):
        llm.generate(["a", "b"], [SamplingParams(), wrong], use_tqdm=False)
    with pytest.raises(RequestError, match="ignore_eos"):
        SamplingParams(ignore_eos=True, structured_outputs=FORMS["json"])
    with pytest.raises(RequestError, match="exactly one"):
        StructuredOutputsParams(regex="a", grammar="b")
