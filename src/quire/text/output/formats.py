"""The description of an output format, and what a parser gives out."""

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
    """More of tool call number ``call``. Its first delta has the name; ``arguments`` concatenate to JSON text."""

    call: int
    arguments: str = ""
    name: str | None = None
    id: str | None = None  # where the model writes one


Delta = ContentDelta | ReasoningDelta | CallDelta
# Name of a tool → its parameters as JSON Schema: values of tagged formats are typed by it.
Tools = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """``{"name": …, "arguments": {…}}``, one or several, alone or in a list. With ``name_is_key``: ``{NAME: {…}}``."""

    name_keys: tuple[str, ...] = ("name", "function", "tool_name")
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    name_is_key: bool = False


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """A header with the name, then the arguments as JSON: ``open header args JSON close``.

    ``header``: a regular expression with the groups ``name`` and, where there is one, ``id``. ``written``: how a
    required call's is written, with ``{name}`` and, where calls are numbered, ``{index}``.
    """

    open: str  # empty: the section's opening opens the call
    args: str
    close: str  # empty: the call ends with its JSON
    header: str = r"\s*(?P<name>[^\s]+?)\s*"
    written: str = "{name}"


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """Parameters one by one: ``open NAME name_end (key KEY key_end value VALUE value_end)* close``."""

    open: str  # empty: the section's opening opens the call
    name_end: str  # empty: the name ends where the next tag begins
    key: str
    key_end: str
    value_end: str
    close: str  # empty: the call ends with its section
    value: str = ""  # stands between a key and its value


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """A list of Python calls with keyword arguments: ``[f(a=1, b="x"), g()]``."""


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    """``call:NAME{key:<|"|>text<|"|>,key:3}``: objects with bare keys and a string mark of their own (Gemma 4)."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a family of models writes reasoning and tool calls."""

    name: str
    # What chat templates of it hold: all of one of these.
    signs: tuple[tuple[str, ...], ...] = ()
    # Each begins a section of calls; the earliest in the text counts, then the longest.
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()  # the end of a section; none: it ends with the calls
    calls: JsonCalls | NamedCalls | TaggedCalls | PythonCalls | GemmaCalls | None = None
    # Calls may also begin the answer with this character, without an opening.
    bare: Literal["", "{", "["] = ""
    listed: bool = False  # calls that are required are one list
    spaced: bool = False  # a line break stands between the marks of a section and what is in it
    reasoning: tuple[str, str] | None = None  # its begin and end
    keeps_reasoning: bool = False  # whatever marks the template shows
    drops: tuple[str, ...] = ()  # marks that belong to nothing
    harmony: bool = False  # gpt-oss: messages with a header that says what they are

    @property
    def plain(self) -> bool:
        """Whether nothing is to be taken apart."""
        return self.calls is None and self.reasoning is None and not self.harmony


_KINDS = {
    "json": JsonCalls,
    "named": NamedCalls,
    "tagged": TaggedCalls,
    "python": PythonCalls,
    "gemma": GemmaCalls,
}


def _format(name: str, said: Mapping[str, Any]) -> OutputFormat:
    values = {key: _frozen(value) for key, value in said.items() if key != "calls"}
    for kind, given in said.get("calls", {}).items():
        values["calls"] = _KINDS[kind](**given)
    return OutputFormat(name, **values)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


FORMATS: dict[str, OutputFormat] = {
    name: _format(name, said)
    for name, said in tomllib.loads((files("quire.text.output") / "formats.toml").read_text()).items()
}


def without_tools(format: OutputFormat) -> OutputFormat:
    """Return the format for a request without tools: reasoning alone is taken apart."""
    return format if format.harmony else replace(format, opens=(), closes=(), calls=None, bare="")


THINK = ("<think>", "</think>")
_REASONING = (THINK, ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


@lru_cache(maxsize=64)
def detect_format(template: str | None) -> OutputFormat:
    """Return the format that fits the template: `plain` where it shows neither calls nor reasoning."""
    if not template:
        return FORMATS["plain"]
    for format in FORMATS.values():
        if any(all(sign in template for sign in signs) for signs in format.signs):
            return _with_reasoning(format, template)
    return FORMATS["reasoning"] if THINK[1] in template else FORMATS["plain"]


def _with_reasoning(format: OutputFormat, template: str) -> OutputFormat:
    """A format has the reasoning marks that its template knows; a model without them may write <think> as text."""
    if format.harmony or format.keeps_reasoning:
        return format
    for begin, end in _REASONING:
        if end in template:
            return replace(format, reasoning=(begin, end))
    return replace(format, reasoning=None)


def prompt_opening(format: OutputFormat, prompt: str) -> str:
    """Return the mark with which the rendered prompt ends, so that the answer begins inside what it opens: the parser
    reads it first. "" where there is none."""
    calls = format.calls
    marks = [format.reasoning[0]] if format.reasoning is not None else []
    if isinstance(calls, NamedCalls) and not format.opens:
        marks.append(calls.open)
    return next((mark for mark in marks if prompt.rstrip().endswith(mark.rstrip())), "")
