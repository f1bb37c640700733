"""Output formats: how each family of models writes reasoning and calls (``formats.toml``), and what a parser returns.

The chat template tells which format a model writes: it shows the model how its earlier calls looked.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple


class ContentDelta(NamedTuple):
    """More of the answer's text."""

    text: str


class ReasoningDelta(NamedTuple):
    """More of the model's reasoning."""

    text: str


class CallDelta(NamedTuple):
    """More of tool call number ``call``. The first delta has the name; all ``arguments`` together are JSON text."""

    call: int
    arguments: str = ""
    name: str | None = None
    id: str | None = None  # if the model writes one


Delta = ContentDelta | ReasoningDelta | CallDelta
# Name of a tool → its parameters as JSON Schema, which gives values of tagged formats their types.
Tools = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """One or several ``{"name": …, "arguments": {…}}``, perhaps in a list. With ``name_is_key``: ``{NAME: {…}}``."""

    name_keys: tuple[str, ...] = ("name", "function", "tool_name")
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    name_is_key: bool = False


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """A header with the name, then the arguments as JSON: ``open header args JSON close``.

    ``header``: a regular expression with the group ``name`` and perhaps ``id``. ``written``: the header of a required
    call, with ``{name}`` and, if calls are numbered, ``{index}``.
    """

    open: str  # empty: the section's opening begins the call
    args: str
    close: str  # empty: the call ends with its JSON
    header: str = r"\s*(?P<name>[^\s]+?)\s*"
    written: str = "{name}"


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """Parameters one by one: ``open NAME name_end (key KEY key_end value VALUE value_end)* close``."""

    open: str  # empty: the section's opening begins the call
    name_end: str  # empty: the name ends at the next tag
    key: str
    key_end: str
    value_end: str
    close: str  # empty: the call ends with its section
    value: str = ""  # mark between a key and its value


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """A list of Python calls with keyword arguments: ``[f(a=1, b="x"), g()]``."""


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    """``call:NAME{key:<|"|>text<|"|>,key:3}``: objects with bare keys and special quotes (Gemma 4)."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a family of models writes reasoning and tool calls."""

    name: str
    # A chat template has this format if it contains all strings of one of these tuples.
    signs: tuple[tuple[str, ...], ...] = ()
    # Each begins a section of calls. The earliest in the text counts; of several there, the longest.
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()  # end of a section; empty: it ends with the calls
    calls: JsonCalls | NamedCalls | TaggedCalls | PythonCalls | GemmaCalls | None = None
    # Calls may also begin the answer with this character, without a section's opening.
    bare: Literal["", "{", "["] = ""
    listed: bool = False  # required calls are written as one list
    spaced: bool = False  # line breaks separate the marks of a section from its contents
    reasoning: tuple[str, str] | None = None  # begin and end mark
    keeps_reasoning: bool = False  # even if the template shows other marks
    drops: tuple[str, ...] = ()  # marks that are dropped
    harmony: bool = False  # gpt-oss: messages whose header says what they are


_KINDS = {
    "json": JsonCalls,
    "named": NamedCalls,
    "tagged": TaggedCalls,
    "python": PythonCalls,
    "gemma": GemmaCalls,
}


def _format(name: str, entry: Mapping[str, Any]) -> OutputFormat:
    values = {key: _frozen(value) for key, value in entry.items() if key != "calls"}
    for kind, given in entry.get("calls", {}).items():
        values["calls"] = _KINDS[kind](**given)
    return OutputFormat(name, **values)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


FORMATS: dict[str, OutputFormat] = {
    name: _format(name, entry)
    for name, entry in tomllib.loads((files("quire.text.output") / "formats.toml").read_text()).items()
}


THINK = ("<think>", "</think>")
_REASONING = (THINK, ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


@lru_cache(maxsize=64)
def detect_format(template: str | None) -> OutputFormat:
    """Return the format that fits the template; `plain` if it shows neither calls nor reasoning."""
    if not template:
        return FORMATS["plain"]
    for format in FORMATS.values():
        if any(all(sign in template for sign in signs) for signs in format.signs):
            return _with_reasoning(format, template)
    return FORMATS["reasoning"] if THINK[1] in template else FORMATS["plain"]


def _with_reasoning(format: OutputFormat, template: str) -> OutputFormat:
    """Return the format with the reasoning marks of its template; without any, <think> in an answer is text."""
    if format.harmony or format.keeps_reasoning:
        return format
    for begin, end in _REASONING:
        if end in template:
            return replace(format, reasoning=(begin, end))
    return replace(format, reasoning=None)


def prompt_opening(format: OutputFormat, prompt: str) -> str:
    """Return the mark at the end of the rendered prompt, "" if there is none. The answer begins inside the section that
    it opens, so the parser reads the mark first.
    """
    calls = format.calls
    marks = [format.reasoning[0]] if format.reasoning is not None else []
    if isinstance(calls, NamedCalls) and not format.opens:
        marks.append(calls.open)
    return next((mark for mark in marks if prompt.rstrip().endswith(mark.rstrip())), "")
