"""Output formats: how each family writes reasoning and calls (``formats.toml``), and what a parser returns."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
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
    inside: str = ""  # the arguments are the value of this key of the JSON object


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """Parameters one by one: ``open NAME name_end (key KEY key_end value VALUE value_end)* close``.

    Between ``key_end`` and ``value`` there may be attributes. Where they contain ``text``, the value is text whatever
    the tool's schema says; other attributes make it JSON if ``text`` is set.
    """

    open: str  # empty: the section's opening begins the call
    name_end: str  # empty: the name ends at the next tag
    key: str
    key_end: str
    value_end: str
    close: str  # empty: the call ends with its section
    value: str = ""  # mark between a key and its value
    text: str = ""
    json: str = ""  # the attributes of JSON that a required call has, with {type}
    attributes: str = ""  # text after the name in a required call
    cdata: bool = False  # a value may stand in <![CDATA[…]]>


@dataclass(frozen=True, slots=True)
class NestedCalls:
    """Parameters as elements: ``open NAME name_end (prefix<KEY>VALUE prefix</KEY>)* close``.

    A value that is an object has elements inside, one that is an array ``item`` elements (MiniMax M3).
    """

    open: str
    name_end: str
    prefix: str
    close: str


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """Python calls with keyword arguments, in a list ``[f(a=1, b="x"), g()]`` or one a line."""


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    """``call:NAME{key:<|"|>text<|"|>,key:3}``: objects with bare keys and special quotes (Gemma)."""

    quote: str = '<|"|>'


@dataclass(frozen=True, slots=True)
class MessageForm:
    """An answer that consists of messages: ``header mark body end``. Both regular expressions search a header."""

    beginnings: tuple[str, ...]  # beginnings of a header; without one: plain text
    mark: str
    ends: tuple[str, ...]
    reasoning: str  # matches the header of reasoning
    recipient: str  # group 1: the tool that the message calls
    written: str  # the header of a required call, with {name}


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a family of models writes reasoning and tool calls."""

    name: str
    # A chat template has this format if it contains all strings of one of these tuples; empty: all marks of the format.
    signs: tuple[tuple[str, ...], ...] = ()
    # Each begins a section of calls. The earliest in the text counts; of several there, the longest.
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()  # end of a section; empty: it ends with the calls
    calls: CallForm | None = None
    # Calls may also begin the answer with this character, without a section's opening.
    bare: Literal["", "{", "["] = ""
    listed: bool = False  # required calls are written as one list
    spaced: bool = False  # line breaks between a section's marks and its contents
    reasoning: tuple[str, str] | None = None  # begin and end mark
    keeps_reasoning: bool = False  # even if the template shows other marks
    drops: tuple[str, ...] = ()  # marks that are dropped
    messages: MessageForm | None = None
    # The template does not show the tools: a system message of ours asks for the calls (`quire.text.output.generic`).
    asks_in_message: bool = False

    @property
    def calls_tools(self) -> bool:
        """Whether the format has calls."""
        return self.calls is not None or self.messages is not None

    @property
    def call_marks(self) -> tuple[str, ...]:
        """What calls begin with; empty: some begin without a mark, so that they cannot be forbidden."""
        if self.bare or self.messages is not None:
            return ()
        return self.opens or tuple(filter(None, (getattr(self.calls, "open", ""),)))

    @property
    def reasons(self) -> bool:
        """Whether the format has reasoning."""
        return self.reasoning is not None or self.messages is not None


CallForm = JsonCalls | NamedCalls | TaggedCalls | NestedCalls | PythonCalls | GemmaCalls
_KINDS = {
    "json": JsonCalls,
    "named": NamedCalls,
    "tagged": TaggedCalls,
    "nested": NestedCalls,
    "python": PythonCalls,
    "gemma": GemmaCalls,
}


def _format(name: str, entry: Mapping[str, Any]) -> OutputFormat:
    values = {key: _frozen(value) for key, value in entry.items() if key not in ("calls", "messages")}
    for kind, fields in entry.get("calls", {}).items():
        values["calls"] = _KINDS[kind](**{key: _frozen(value) for key, value in fields.items()})
    if "messages" in entry:
        values["messages"] = MessageForm(**{key: _frozen(value) for key, value in entry["messages"].items()})
    return OutputFormat(name, **values)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


FORMATS: dict[str, OutputFormat] = {
    name: _format(name, entry)
    for name, entry in tomllib.loads((files("quire.text.output") / "formats.toml").read_text()).items()
}


def prompt_opening(format: OutputFormat, prompt: str) -> str:
    """Return the mark at the end of the rendered prompt, "" if there is none. The answer begins inside the section that
    it opens, so the parser reads the mark first.
    """
    calls = format.calls
    marks = [format.reasoning[0]] if format.reasoning is not None else []
    if isinstance(calls, NamedCalls) and not format.opens:
        marks.append(calls.open)
    return next((mark for mark in marks if prompt.rstrip().endswith(mark.rstrip())), "")
