"""Required calls: in every format, all text that the grammar allows parses as calls of the tools."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from tests.text.test_grammar import Vocabulary
from tests.text.test_output_round_trip import calls_of

from quire.models.checkpoint import read_tokenizer
from quire.models.hub import quill_path
from quire.structured_outputs import StructuredOutputsParams
from quire.text.output.call_grammar import after_reasoning, form_of, required_calls
from quire.text.output.formats import FORMATS, ReasoningDelta
from quire.text.output.parser import OutputParser

SEED = 20261121
TOOLS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Zürich", 'a "b"', "x<y"]},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "parts": {"type": "array", "items": {"enum": [1, "two", None]}, "maxItems": 3},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
REQUIRABLE = [name for name, f in FORMATS.items() if required_calls(f, TOOLS, list(TOOLS), parallel=True)]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(read_tokenizer(quill_path("quill")))


def write(vocabulary: Vocabulary, form: dict[str, Any], rng: random.Random) -> str:
    """Sample an answer that the grammar allows, and end it as soon as possible."""
    constraint = vocabulary.start(StructuredOutputsParams(structural_tag={"format": form}))
    ids: list[int] = []
    while len(ids) < 4000:
        mask = np.ones(vocabulary.size, np.bool_)
        constraint.mask(mask)
        assert constraint.error is None
        allowed = [i for i in np.flatnonzero(mask).tolist() if i != vocabulary.eos]
        if mask[vocabulary.eos] and (not allowed or rng.random() < 0.8):
            return vocabulary.tokenizer.decode(ids, skip_special_tokens=False, continues=True)
        ids.append(rng.choice(allowed))
        constraint.advance(ids[-1])
    raise AssertionError(vocabulary.tokenizer.decode(ids))


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", REQUIRABLE)
def test_what_is_written_is_read_as_calls(vocabulary: Vocabulary, name: str, parallel: bool) -> None:
    rng = random.Random(SEED)
    format = FORMATS[name]
    form = required_calls(format, TOOLS, list(TOOLS), parallel=parallel)
    assert form is not None
    called = set()
    for _ in range(12):
        text = write(vocabulary, form, rng)
        parser = OutputParser(format, TOOLS)
        calls = calls_of(parser.feed(text) + parser.finish())
        assert calls, text
        assert len(calls) == 1 or parallel, text
        for tool, arguments in calls:
            jsonschema.validate(arguments, TOOLS[tool])
            called.add(tool)
    assert called == set(TOOLS), f"seed {SEED}"


def test_one_named_tool_behind_reasoning(vocabulary: Vocabulary) -> None:
    format = FORMATS["hermes"]
    form = required_calls(format, TOOLS, ["now"], parallel=False)
    assert form is not None
    constraint = vocabulary.start(
        StructuredOutputsParams(structural_tag={"format": after_reasoning(format, form)})
    )
    text = 'I think.</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for token_id in vocabulary.tokenizer.encode(text, add_special_tokens=False, allow_special=False):
        constraint.advance(token_id)
        assert constraint.error is None
    parser = OutputParser(format, TOOLS, opening="<think>")
    deltas = parser.feed(text) + parser.finish()
    assert deltas[0] == ReasoningDelta("I think.")
    assert calls_of(deltas) == [("now", {})]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json", {"enum": [5]}),
        ("json", '{"enum": [5]}'),
        ("regex", "5"),
        ("choice", ["5", "5"]),
        ("grammar", 'start: "5"'),
    ],
)
def test_a_form_behind_reasoning(vocabulary: Vocabulary, kind: str, value: Any) -> None:
    part = form_of(kind, value)
    assert part is not None
    form = {"type": "sequence", "elements": [{"type": "const_string", "value": "x"}, part]}
    assert write(vocabulary, form, random.Random(SEED)) == "x5"
    json.dumps(after_reasoning(FORMATS["hermes"], part))
