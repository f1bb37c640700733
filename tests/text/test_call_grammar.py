"""Required calls: in every format, all text that the grammar allows parses as calls of the tools."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from tests.text.test_grammar import Vocabulary
from tests.text.test_output_round_trip import calls_of

from quire.errors import RequestError
from quire.models.checkpoint import read_tokenizer
from quire.models.hub import quill_path
from quire.structured_outputs import StructuredOutputsParams
from quire.text.lark_in_json import lark_in_json
from quire.text.output.call_grammar import (
    LARK,
    after_reasoning,
    calls_in_text,
    form_of,
    required_calls,
)
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
        may_end = bool(mask[vocabulary.eos])
        mask[vocabulary.eos] = False
        allowed = np.flatnonzero(mask)
        if may_end and (not len(allowed) or rng.random() < 0.8):
            return vocabulary.tokenizer.decode(ids, skip_special_tokens=False, continues=True)
        ids.append(int(allowed[rng.randrange(len(allowed))]))
        constraint.advance(ids[-1])
    raise AssertionError(vocabulary.tokenizer.decode(ids))


@pytest.mark.parametrize("least", [3, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", REQUIRABLE)
def test_what_is_written_is_read_as_calls(
    vocabulary: Vocabulary, name: str, parallel: bool, least: int
) -> None:
    """``least``: as many texts are written, and more until each tool was called."""
    rng = random.Random(SEED)
    format = FORMATS[name]
    form = required_calls(format, TOOLS, list(TOOLS), parallel=parallel)
    assert form is not None
    called: set[str] = set()
    for count in range(12):
        if count >= least and called == set(TOOLS):
            break
        text = write(vocabulary, form, rng)
        parser = OutputParser(format, TOOLS)
        calls = calls_of(parser.feed(text) + parser.finish())
        assert calls, text
        assert len(calls) == 1 or parallel, text
        for tool, arguments in calls:
            jsonschema.validate(arguments, TOOLS[tool])
            called.add(tool)
    assert called == set(TOOLS), f"seed {SEED}"


SAID = re.compile('say "[a-z]{1,4}"\n(\\+[^\n]{0,3}\n){1,3}end\\\\')
LARK_OF_SAID = r"""
start: "say \"" word "\"" LF line{1,3} "end\\" // a comment
word: /[a-z]{1,4}/
line: "+" /.{0,3}/ LF
%import common.LF
"""
PATCH: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string", LARK: LARK_OF_SAID}},
    "required": ["input"],
    "additionalProperties": False,
}
WITH_PATCH = {"patch": PATCH, "now": TOOLS["now"]}


@pytest.mark.parametrize("name", REQUIRABLE)
def test_text_of_a_custom_tool_keeps_to_its_lark_grammar(vocabulary: Vocabulary, name: str) -> None:
    rng, format = random.Random(SEED), FORMATS[name]
    form = required_calls(format, WITH_PATCH, ["patch"], parallel=False)
    assert form is not None
    for _ in range(4):
        text = write(vocabulary, form, rng)
        parser = OutputParser(format, WITH_PATCH)
        ((tool, arguments),) = calls_of(parser.feed(text) + parser.finish())
        assert (tool, set(arguments)) == ("patch", {"input"}), text
        assert SAID.fullmatch(arguments["input"]), text


@pytest.mark.parametrize("name", [n for n in REQUIRABLE if calls_in_text(FORMATS[n], WITH_PATCH)])
def test_a_call_in_text_keeps_to_the_grammar_too(vocabulary: Vocabulary, name: str) -> None:
    format = FORMATS[name]
    form = calls_in_text(format, WITH_PATCH)
    assert form is not None
    call = write(
        vocabulary, required_calls(format, WITH_PATCH, ["patch"], parallel=False) or {}, random.Random(SEED)
    )
    for text, fits in (
        ("Plain text.", True),
        (f"Sure.\n{call}", True),
        (f"Sure.\n{call.replace('say', 'sing')}", False),
    ):
        constraint = vocabulary.start(StructuredOutputsParams(structural_tag={"format": form}))
        for token_id in vocabulary.tokenizer.encode(text, add_special_tokens=False, allow_special=False):
            mask = np.ones(vocabulary.size, np.bool_)
            constraint.mask(mask)
            if not mask[token_id]:
                break
            constraint.advance(token_id)
        else:
            assert fits, text
            continue
        assert not fits, text


@pytest.mark.parametrize(
    ("lark", "inside", "texts", "others"),
    [
        (r'start: "a\"b"', "lit", ['a"b'], ["ab"]),
        (r"start: /[^x]+/", "class", ['"\n\\', "é\t"], ["x"]),
        (r"start: /\d{2}\w\s?/", "categories", ["12a", "12_\t"], ["1aa", '12"']),
        (r'start: "Ab"i "a".."c"', "case", ["aBc", "ABa"], ["abd"]),
        (r"start: /(?s:.)\./", "any", ["\n.", '".'], ["aa"]),
    ],
)
def test_lark_inside_a_json_string(
    vocabulary: Vocabulary, lark: str, inside: str, texts: list[str], others: list[str]
) -> None:
    form = {
        "type": "tag",
        "begin": '"',
        "content": {"type": "grammar", "grammar": lark, "in_json": True},
        "end": '"',
    }
    for text in (*texts, *others):
        constraint = vocabulary.start(StructuredOutputsParams(structural_tag={"format": form}))
        written = json.dumps(text, ensure_ascii=False)
        fits = True
        for token_id in vocabulary.tokenizer.encode(written, add_special_tokens=False, allow_special=False):
            mask = np.ones(vocabulary.size, np.bool_)
            constraint.mask(mask)
            fits = fits and bool(mask[token_id])
            if not fits:
                break
            constraint.advance(token_id)
        assert fits == (text in texts), f"{inside}: {text!r}"


@pytest.mark.parametrize(
    "lark", [r"start: /a(?=b)/", "start: %json {}", "start: X\n%import common.MAGIC -> X"]
)
def test_what_cannot_stand_in_a_json_string_is_refused(lark: str) -> None:
    with pytest.raises(RequestError, match=r"custom tool|MAGIC"):
        lark_in_json(lark)


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
