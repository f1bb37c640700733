"""`Assembler`: the text of one answer as parts (reasoning, text, calls). Dialects render the events that it yields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from quire.api.output_plan import OutputPlan
from quire.request import FinishReason
from quire.text.output.formats import CallDelta, ContentDelta, Delta


class Kind(StrEnum):
    """The kind of a part."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Part:
    """A part so far. ``text``: of a call its arguments (JSON if the model writes JSON)."""

    kind: Kind
    index: int  # among the parts of the answer
    text: str = ""
    name: str = ""  # the called tool
    id: str = ""  # id of the call
    call: int = 0  # index among the calls


class Event(NamedTuple):
    """A part opens, gains text, or closes. Each opens once and closes once, before the next one opens."""

    verb: str  # "open" | "more" | "close"
    part: Part
    text: str = ""


class Assembler:
    """Takes the text of one answer in pieces; ``plan`` None: all of it is text."""

    def __init__(self, plan: OutputPlan | None, call_id: Callable[[int], str]) -> None:
        """``call_id``: returns the id of the call of an index, where the model writes none."""
        self.parts: list[Part] = []
        self.num_calls = 0
        self._plan = plan
        self._parser = None if plan is None else plan.parser()
        self._call_id = call_id
        self._is_open = False

    def feed(self, text: str, end: FinishReason | None) -> list[Event]:
        """Take more text; ``end`` says why the answer ends with it."""
        events: list[Event] = []
        for delta in self._deltas(text, end):
            self._add(events, delta)
        if end is not None:
            self._close(events)
        return events

    def text(self, kind: Kind) -> str:
        """Return the text of all parts of one kind."""
        return "".join([part.text for part in self.parts if part.kind is kind])

    def _deltas(self, text: str, end: FinishReason | None) -> list[Delta]:
        if self._parser is None:
            return [ContentDelta(text)]
        deltas = self._parser.feed(text) if text else []
        if end is None:
            return deltas
        cut = end is not FinishReason.STOP
        rest = self._parser.finish(cut=cut)
        if self._parser.was_unmarked and self._plan is not None:
            self._plan.notes["unmarked_calls"] = True
        if cut and self._plan is not None and self._plan.required:  # the piece of a call that was cut
            rest = [delta for delta in rest if not isinstance(delta, ContentDelta)]
        return deltas + rest

    def _add(self, events: list[Event], delta: Delta) -> None:
        plan = self._plan
        if isinstance(delta, CallDelta):
            assert plan is not None
            if plan.max_calls is not None and delta.call >= plan.max_calls:
                return
            if delta.name is not None:
                self._open(events, Kind.CALL, delta.name, delta.id or self._call_id(self.num_calls))
                self.num_calls += 1
            self._more(events, delta.arguments)
            return
        kind = Kind.TEXT if isinstance(delta, ContentDelta) else Kind.REASONING
        if not delta.text or (kind is Kind.REASONING and plan is not None and not plan.with_reasoning):
            return
        if not self._is_open or self.parts[-1].kind is not kind:
            self._open(events, kind)
        self._more(events, delta.text)

    def _open(self, events: list[Event], kind: Kind, name: str = "", call_id: str = "") -> None:
        self._close(events)
        self.parts.append(Part(kind, len(self.parts), name=name, id=call_id, call=self.num_calls))
        self._is_open = True
        events.append(Event("open", self.parts[-1]))

    def _more(self, events: list[Event], text: str) -> None:
        if text:
            self.parts[-1].text += text
            events.append(Event("more", self.parts[-1], text))

    def _close(self, events: list[Event]) -> None:
        if self._is_open:
            self._is_open = False
            events.append(Event("close", self.parts[-1]))
