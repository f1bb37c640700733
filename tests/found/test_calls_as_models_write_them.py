"""Calls that are not quite as their format says, however the text is cut into pieces."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from quire.text.output.formats import FORMATS, CallDelta, ContentDelta
from quire.text.output.parser import OutputParser

TOOLS: dict[str, Any] = {
    "look": {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}},
    "now": {"type": "object", "properties": {}},
}


def _read(
    name: str, text: str, cuts: random.Random | None = None, *, unmarked: bool = False
) -> tuple[list[tuple[str, Any]], str]:
    """Return the calls (name, arguments) and the content."""
    parser = OutputParser(FORMATS[name], TOOLS, unmarked=unmarked)
    deltas = []
    while text:
        size = len(text) if cuts is None else cuts.randint(1, 6)
        deltas += parser.feed(text[:size])
        text = text[size:]
    deltas += parser.finish()
    calls: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, CallDelta):
            if delta.name is not None:
                calls.append([delta.name, ""])
            calls[delta.call][1] += delta.arguments
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    return [(name, json.loads(arguments)) for name, arguments in calls], content


def _half_closed(value: str, rest: str = "") -> str:
    return f"<tool_call>\n<function=look>\n<parameter=city>{value}{rest}"


CASES = [
    ("hermes", '<tool_call>\n{"name": "now", "arguments": null}\n</tool_call>', [("now", {})]),
    ("hermes", '<tool_call>\n{"arguments": null, "name": "now"}\n</tool_call>', [("now", {})]),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": ""}\n</tool_call>', [("now", {})]),
    ("functionary-v3.1", "<function=now>null</function>", [("now", {})]),
    ("qwen3-coder", _half_closed("x", "<parameter=n>5</parameter></function></tool_call>"),
     [("look", {"city": "x", "n": 5})]),
    ("qwen3-coder", _half_closed("\nx\n", "<parameter=n>5\n</function>\n</tool_call>"),
     [("look", {"city": "x", "n": 5})]),
    ("qwen3-coder", _half_closed("x</function>"), [("look", {"city": "x"})]),
    ("qwen3-coder", _half_closed("x</function>\n<function=now>\n</function>\n</tool_call>"),
     [("look", {"city": "x"}), ("now", {})]),
    # Text that only looks like a tag is text.
    ("qwen3-coder", _half_closed("a </function> b <parameter=q>c</parameter></function></tool_call>"),
     [("look", {"city": "a </function> b <parameter=q>c"})]),
    ("glm-4.x", "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>x<arg_key>n</arg_key>"
     "<arg_value>5</arg_value></tool_call>", [("look", {"city": "x", "n": 5})]),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CASES)))
def test_calls_are_read_as_they_are_meant(case: int) -> None:
    name, text, expected = CASES[case]
    assert _read(name, text) == (expected, "")
    for seed in range(20):
        assert _read(name, text, random.Random(seed)) == (expected, ""), f"seed {seed}"


CALL = '{"name": "look", "arguments": {"city": "Z\\u00fcrich {", "n": 5}}'
MEANT = ("look", {"city": "Zürich {", "n": 5})
# Format, text, calls: an answer that is JSON of calls as a whole.
UNMARKED: list[tuple[str, str, list[Any]]] = [
    ("hermes", CALL, [MEANT]),
    ("hermes", f" {CALL}\n", [MEANT]),
    ("hermes", f'{CALL}\n{{"name": "now", "arguments": null}}', [MEANT, ("now", {})]),
    ("hermes", f"<think>so</think>\n\n{CALL}", [MEANT]),
    ("hermes", '{"arguments": "{\\"n\\": 1}", "name": "look"}', [("look", {"n": 1})]),
    ("qwen3-coder", CALL, [MEANT]),
    ("hermes", f"```json\n{CALL}\n```", [MEANT]),
    ("hermes", f"```\n{CALL}\n```\n", [MEANT]),
    ("hermes", f"```json\n{CALL}\n{CALL}\n```", [MEANT, MEANT]),
    ("hermes", f"```json\n{CALL}\n```\n\n```json\n{CALL}\n```", [MEANT, MEANT]),
]
# Texts that only look like it are content, as they stand.
CONTENT = [
    '{"name": "other", "arguments": {}}',
    '{"name": "look"}',
    '{"name": "look", "arguments": {}, "more": 1}',
    '{"name": "look", "arguments": [1]}',
    f"{CALL} is what I would call.",
    f"I call {CALL}",
    f"```json\n{CALL}\n```\nis what I would call.",
    f"So:\n```json\n{CALL}\n```",
    f"```json\n{CALL}",
    f"{CALL}\n```",
    f"```python\n{CALL}\n```",
    "```json\n```",
    '```json\n{"name": "other", "arguments": {}}\n```',
    '{"name": "look", "arguments": {"city": "x"',
    '{"look": 1}',
    "{",
]


def _deltas(
    text: str, size: int, *, cut: bool = False, unmarked: bool = True
) -> tuple[list[list[Any]], bool]:
    parser = OutputParser(FORMATS["hermes"], TOOLS, unmarked=unmarked)
    found = [list(parser.feed(text[i : i + size])) for i in range(0, len(text), size)]
    return [*found, list(parser.finish(cut=cut))], parser.was_unmarked


@pytest.mark.parametrize("case", range(len(UNMARKED)))
def test_an_answer_that_is_calls_alone_is_read_as_calls(case: int) -> None:
    name, text, expected = UNMARKED[case]
    for seed in range(12):
        assert _read(name, text, random.Random(seed), unmarked=True) == (expected, ""), f"seed {seed}"
    assert _read(name, text)[0] == [], "only where it is asked for"


@pytest.mark.parametrize("text", CONTENT)
def test_text_that_only_looks_like_calls_is_content(text: str) -> None:
    for seed in range(12):
        assert _read("hermes", text, random.Random(seed), unmarked=True) == ([], text), f"seed {seed}"
    deltas, was_unmarked = _deltas(CALL, 5, cut=True)
    assert "".join(delta.text for some in deltas for delta in some) == CALL, "the end is not known"
    assert not was_unmarked


def test_text_is_held_only_while_it_can_be_a_call() -> None:
    for text, held in (
        ('{"a": 1} is JSON', 2),
        ('{"name": "other"', 10),
        ('{"name": "look", "arguments": {city', 30),
        ('{"name": "look", "arguments": {"city": oops', 38),
        (f"{CALL} and", len(CALL)),
        ('```json\n{"a": 1}\n```', 10),
        ("```python", 3),
    ):
        deltas, _ = _deltas(text, 1)
        first = next(i for i, some in enumerate(deltas) if some)
        assert first <= held + 2, text
        assert "".join(delta.text for some in deltas for delta in some) == text
