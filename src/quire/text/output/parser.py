"""`OutputParser`: the text of an answer in pieces → content, reasoning and calls.

One parser serves every format. The deltas add up to the same answer however the text is cut into pieces, so a whole
answer is parsed as one piece.
"""

from __future__ import annotations

from collections.abc import Collection

from quire.text.output.formats import (
    CallDelta,
    ContentDelta,
    Delta,
    GemmaCalls,
    JsonCalls,
    NamedCalls,
    NestedCalls,
    OutputFormat,
    PythonCalls,
    ReasoningDelta,
    TaggedCalls,
    Tools,
)
from quire.text.output.literals import gemma_calls, python_calls
from quire.text.output.messages import read_messages
from quire.text.output.reader import Reader, Trimmed, Wait, partial_mark
from quire.text.output.sections import Calls, NotCalls, json_calls, named_calls
from quire.text.output.tagged import nested_calls, tagged_calls
from quire.text.output.unmarked import OPENINGS, unmarked_calls

MIN_PIECE = 2  # characters of a mark; one alone is more often text


class OutputParser:
    """Parses one answer.

    ``opening``: the mark at the end of the prompt (`prompt_opening`). ``hidden``: texts of special tokens that are not
    shown in the answer; marks that the format needs are recognized all the same. ``unmarked``: an answer that is JSON
    of calls alone is read as calls although the format has a mark (`quire.text.output.unmarked`).
    """

    def __init__(
        self,
        format: OutputFormat,
        tools: Tools | None = None,
        *,
        opening: str = "",
        hidden: Collection[str] = (),
        unmarked: bool = False,
    ) -> None:
        self.num_calls = 0
        self.was_unmarked = False  # the answer's calls had no mark
        self._format = format
        self._tools = tools or {}
        self._drops = (*format.drops, *hidden)
        self._reader = Reader()
        self._out: list[Delta] = []
        self._text = Trimmed(self._content)
        calls = format.calls
        # If a section has no opening, the opening of its first call begins it.
        first = (calls.open,) if isinstance(calls, NamedCalls | TaggedCalls) else ()
        self._opens = format.opens or first
        self._may_be_unmarked = unmarked and bool(self._tools and self._opens) and format.bare != "{"
        self._is_cut = False
        if format.messages is None:
            self._main = self._run()
        else:
            begin, body = self._begin if self._tools else None, self._body if calls is not None else None
            emit = self._text, self._reasoning, begin, self._arguments
            self._main = read_messages(self._reader, format.messages, *emit, body)
        self._ended = False
        self._reader.add(opening)

    def feed(self, text: str) -> list[Delta]:
        """Take more text; return its deltas."""
        self._reader.add(text)
        return self._advance()

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """Return what was held back at the end of the text; of a ``cut`` one without the piece of a mark."""
        self._is_cut = cut
        self._reader.close()
        deltas = self._advance()
        assert self._ended, "the parser waits for text after the end"
        f = self._format
        marks = (*self._opens, *f.closes, *(f.reasoning or ()), *self._drops)
        return _without_piece(deltas, marks) if cut and deltas else deltas

    def _body(self) -> Wait[None]:
        """Read the calls of a message to a tool, up to the end of their section."""
        before = self.num_calls
        opening = yield from self._reader.starts(self._opens)
        if opening is not None:
            self._reader.take(len(opening))
            yield from self._section(opening)
        if self.num_calls > before:
            self._text.after_section()

    def _advance(self) -> list[Delta]:
        if not self._ended and next(self._main, "ended") == "ended":
            self._ended = True
        out, self._out = self._out, []
        return out

    def _content(self, text: str) -> None:
        self._out.append(ContentDelta(text))

    def _reasoning(self, text: str) -> None:
        self._out.append(ReasoningDelta(text))

    def _begin(self, name: str, call_id: str | None) -> None:
        self._out.append(CallDelta(self.num_calls, name=name, id=call_id))
        self.num_calls += 1

    def _arguments(self, text: str) -> None:
        if text:
            self._out.append(CallDelta(self.num_calls - 1, text))

    def _run(self) -> Wait[None]:
        """Read content that has sections of reasoning and calls."""
        opens = self._opens
        yield from self._lead()
        while (marker := (yield from self._reader.until((*opens, *self._drops), self._text.add))) is not None:
            if marker in opens:
                yield from self._section(marker)
            if not self._text.shown:
                yield from self._lead()
        self._text.end()

    def _lead(self) -> Wait[None]:
        """Read what can only begin an answer: reasoning, and calls without an opening."""
        f, reader = self._format, self._reader
        self._text.add((yield from reader.space()))
        if f.reasoning is not None and (yield from reader.starts((f.reasoning[0],))) is not None:
            reader.take(len(f.reasoning[0]))
            yield from self._reason()
            self._text.add((yield from reader.space()))
        if f.bare and (yield from reader.peek()) == f.bare:
            reader.mark()
            yield from self._calls(f.bare, frozenset(self._tools))
        elif self._may_be_unmarked and not self.num_calls and (yield from reader.starts(OPENINGS)):
            yield from self._unmarked()

    def _unmarked(self) -> Wait[None]:
        """Read the whole answer as calls without marks; text that is anything else is read again."""
        self._may_be_unmarked = False
        self._reader.mark()
        try:
            calls = yield from unmarked_calls(self._reader, self._tools, self._drops)
            if self._is_cut:
                raise NotCalls
        except NotCalls:
            self._reader.back()
            return
        self._reader.forget()
        self.was_unmarked = True
        for call in calls:
            self._begin(call.name, call.id)
            self._arguments(call.arguments)
        self._text.after_section()

    def _reason(self) -> Wait[None]:
        assert self._format.reasoning is not None
        text = Trimmed(self._reasoning)
        text.after_section()
        end = self._format.reasoning[1]
        while (marker := (yield from self._reader.until((end, *self._drops), text.add))) not in (end, None):
            continue
        if marker is None:
            text.end()
        self._text.after_section()

    def _section(self, marker: str) -> Wait[None]:
        """Read calls after an opening, which `until` has passed."""
        self._reader.rewind(marker)
        self._reader.mark()
        if marker in self._format.opens:
            self._reader.take(len(marker))
        yield from self._calls(marker, None)

    def _calls(self, opening: str, known: frozenset[str] | None) -> Wait[None]:
        """Read a section. If it does not begin with a call, its opening is content and the rest is read again."""
        calls = Calls(
            self._reader, self._begin, self._arguments, self._format.closes, known, self._format.drops
        )
        before = self.num_calls
        try:
            yield from self._read(calls)
            self._reader.forget()
        except NotCalls:
            self._reader.back()
            if self.num_calls == before:
                mark = self._reader.take(len(opening))
                self._text.add("" if mark in self._drops else mark)
                return
        self._text.after_section()

    def _read(self, calls: Calls) -> Wait[None]:
        form = self._format.calls
        if isinstance(form, JsonCalls):
            yield from json_calls(calls, form)
        elif isinstance(form, NamedCalls):
            yield from named_calls(calls, form)
        elif isinstance(form, TaggedCalls):
            yield from tagged_calls(calls, form, self._tools)
        elif isinstance(form, NestedCalls):
            yield from nested_calls(calls, form, self._tools)
        elif isinstance(form, PythonCalls):
            yield from python_calls(calls, self._tools)
        elif isinstance(form, GemmaCalls):
            yield from gemma_calls(calls, form)


def _without_piece(deltas: list[Delta], marks: tuple[str, ...]) -> list[Delta]:
    """Return the last deltas of a text without the beginning of a mark at its end."""
    last = deltas[-1]
    if isinstance(last, CallDelta):
        return deltas
    rest = [delta for delta in deltas if type(delta) is not type(last)]
    text = "".join([d.text for d in deltas if isinstance(d, type(last))])  # held text, in pieces
    at = partial_mark(text, 0, marks)
    if len(text) - at < MIN_PIECE:
        return deltas
    return [*rest, type(last)(text[:at])] if text[:at].strip() else rest
