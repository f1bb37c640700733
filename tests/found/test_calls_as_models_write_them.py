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


def _read(name: str, text: str, cuts: random.Random | None = None) -> tuple[list[tuple[str, Any]], str]:
    """Return the calls (name, arguments) and the content."""
    parser = OutputParser(FORMATS[name], TOOLS)
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
