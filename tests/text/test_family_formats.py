"""Newer families: their templates are recognized, and parse(render(calls)) == calls however the text is cut."""

from __future__ import annotations

import json
import random
from datetime import datetime
from typing import Any

import pytest
from tests.text.bfcl import Case, rendered
from tests.text.family_templates import FAMILIES, UNKNOWN
from tests.text.test_output_round_trip import calls_of, parse

from quire.text.chat_template import ChatTemplate
from quire.text.output.detect import detect_format, shows_tools
from quire.text.output.formats import FORMATS, ContentDelta, ReasoningDelta
from quire.text.output.generic import describe, format_of, with_tools_as_text
from quire.text.output.parser import OutputParser
from quire.text.tokenizer import SpecialTokens

SEED = 20261122
PLACE = {"type": "object", "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {}}}}
TOOLS = (
    {"name": "find_place", "parameters": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "limit": {"type": "integer"},
            "exact": {"type": "boolean"},
            "near": {"$ref": "#/$defs/place"},
            "code": {"$ref": "#/$defs/code"},
            "ids": {"type": "array", "items": {"type": "number"}},
        },
        "$defs": {"place": PLACE, "code": {"type": "string"}},
    }},
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
)  # fmt: skip
CALLS: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "nested": (
        ("find_place", {"query": "café", "near": {"name": "Zürich", "tags": ["a b", 2, True]}, "ids": [1, 2.5]}),
    ),
    "quotes": (("find_place", {"query": 'say "hi", it\'s <b> & {x}', "limit": 3, "exact": False}),),
    "text like JSON": (("find_place", {"query": "null", "code": "007", "limit": 0}),),
    "unicode, lines": (("find_place", {"query": "東京 — 🚲\nline two", "code": "true"}),),
    "several": (("now", {}), ("find_place", {"query": "x"}), ("find_place", {"query": "y", "limit": -1})),
}  # fmt: skip


def case_of(calls: tuple[tuple[str, dict[str, Any]], ...]) -> Case:
    return Case("own", "Hi?", tuple({"type": "function", "function": tool} for tool in TOOLS), calls)


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, SpecialTokens({}), lambda: datetime(2026, 1, 1))


@pytest.mark.parametrize("name", FAMILIES)
def test_template_is_recognized(name: str) -> None:
    assert detect_format(FAMILIES[name]).name == name


@pytest.mark.parametrize("name", UNKNOWN)
def test_template_with_some_of_the_marks_is_no_older_format(name: str) -> None:
    assert shows_tools(UNKNOWN[name])
    assert detect_format(UNKNOWN[name]).name == "plain"


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("name", FAMILIES)
def test_rendered_calls_are_read_however_they_are_cut(name: str, calls: str) -> None:
    case = case_of(CALLS[calls])
    turn = rendered(template_of(FAMILIES[name]), case)
    assert turn is not None
    prompt, text = turn
    text = text.removesuffix("<|end|>")
    format = FORMATS[name]
    whole = parse(format, case, prompt, [text])
    assert calls_of(whole) == list(case.calls), text
    assert not any(isinstance(delta, ContentDelta) for delta in whole)
    assert parse(format, case, prompt, list(text)) == whole
    for at in (
        random.Random(SEED).sample(range(1, len(text)), 12) if calls != "quotes" else range(len(text) + 1)
    ):
        assert parse(format, case, prompt, [text[:at], text[at:]]) == whole, at


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("muse", "to=self<|message|>Why.<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>"),
        (
            "inkling",
            "<|content_thinking|>Why.<|end_message|><|message_model|><|content_text|>Yes.<|end_message|>",
        ),
        (
            "kimi-k3",
            "<|open|>think<|sep|>Why.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|>",
        ),
        ("minimax-m3", "<mm:think>Why.</mm:think>Yes."),
        ("deepseek-v3.2", "<think>Why.</think>Yes."),
        ("k2-horizon", "<ifm|think>Why.</ifm|think>\nYes."),
        ("hy-v3-opensource", "<think:opensource>Why.</think:opensource>Yes."),
        ("longcat", "<longcat_think>\nWhy.\n</longcat_think>\nYes."),
        ("command-a", "<|START_THINKING|>Why.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>"),
        ("ernie", "<think>\nWhy.\n</think>\n\n<response>\nYes.</response>\n"),
    ],
)
def test_reasoning_and_answer_of_a_family(name: str, text: str) -> None:
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        parser = OutputParser(
            FORMATS[name], {"now": {}}, opening="<|message_model|>" if name == "inkling" else ""
        )
        deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
        assert "".join(d.text for d in deltas if isinstance(d, ReasoningDelta)) == "Why."
        assert "".join(d.text for d in deltas if isinstance(d, ContentDelta)).strip() == "Yes."


@pytest.mark.parametrize(
    ("source", "begin"),
    [
        ("{{ '<thought>\n' }}{{ message.r }}</thought>", "<thought>"),
        ("Here is my thought process: {{ x }} Here is my response: {{ y }}", "Here is my thought process:"),
        ("◁think▷{{ x }}◁/think▷", "◁think▷"),
        ("<|inner_prefix|>{{ x }}<|inner_suffix|>", "<|inner_prefix|>"),
    ],
)
def test_formats_that_only_reason(source: str, begin: str) -> None:
    format = detect_format(source)
    assert (format.name, format.calls) == ("reasoning", None)
    assert format.reasoning is not None
    assert format.reasoning[0] == begin


def test_value_in_cdata_and_arguments_as_one_object() -> None:
    tools = {tool["name"]: tool["parameters"] for tool in TOOLS}
    text = '<function name="find_place"><param name="query"><![CDATA[a </param> b]]></param></function>'
    for pieces in ([text], list(text)):
        parser = OutputParser(FORMATS["minicpm5"], tools)
        deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
        assert calls_of(deltas) == [("find_place", {"query": "a </param> b"})]
    for name, begin, end in (
        (
            "deepseek-v4",
            '<｜DSML｜tool_calls><｜DSML｜invoke name="now">',
            "</｜DSML｜invoke></｜DSML｜tool_calls>",
        ),
        ("hy-v3", "<tool_calls><tool_call>now<tool_sep>", "</tool_call></tool_calls>"),
    ):
        parser = OutputParser(FORMATS[name], tools)
        deltas = parser.feed(f'{begin} {{"a": {{"b": 1}}}} {end}') + parser.finish()
        assert calls_of(deltas) == [("now", {"a": {"b": 1}})], name


def test_types_by_reference_alternatives_and_null() -> None:
    tools: dict[str, Any] = {"f": {
        "properties": {
            "ref": {"$ref": "#/definitions/code"},
            "text": {"type": "string"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "nullable": {"type": "string", "nullable": True},
            "either": {"oneOf": [{"type": "integer"}, {"type": "string"}]},
            "fixed": {"const": "5"},
            "all": {"allOf": [{"$ref": "#/definitions/code"}]},
        },
        "definitions": {"code": {"type": "string"}},
    }}  # fmt: skip
    values = {
        "ref": ("null", "null"), "text": ("null", "null"), "maybe": ("null", None), "nullable": ("null", None),
        "either": ("null", "null"), "fixed": ("5", "5"), "all": ("[1]", "[1]"),
    }  # fmt: skip
    parts = "".join(f"<parameter={key}>{text}</parameter>" for key, (text, _) in values.items())
    parser = OutputParser(FORMATS["qwen3-coder"], tools)
    deltas = parser.feed(f"<tool_call><function=f>{parts}</function></tool_call>") + parser.finish()
    assert calls_of(deltas) == [("f", {key: value for key, (_, value) in values.items()})]
    json.dumps(calls_of(deltas))


@pytest.mark.parametrize(
    ("source", "role"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{# system #}", "system"),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}",
            "user",
        ),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "user"),
    ],
)
def test_generic_calls_are_asked_for_where_the_template_lets_them(source: str, role: str) -> None:
    assert format_of(source).asks_in_message
    turns = with_tools_as_text(
        [{"role": "user", "content": "Hi"}], [{"type": "function", "function": TOOLS[1]}], source
    )
    assert turns[0]["role"] == role
    assert '"name": "now"' in turns[0]["content"]
    assert turns[-1]["content"].endswith("Hi")
    assert "generic" in describe(source)


def test_start_up_names_what_the_template_shows() -> None:
    assert describe(FAMILIES["step3"]) == "step3 (from the chat template)"
    assert "no known format" in describe(UNKNOWN["marks of its own"])
    assert "shows no tools" in describe("{{ messages[0].content }}")
