"""One answer as a sequence of parts — reasoning, text, calls — in the order in which the model writes them.

OpenAI's chat keeps one content and a list of calls; Anthropic's messages and OpenAI's responses keep this order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from quire.api.tools import OutputPlan
from quire.text.output import CallDelta, ContentDelta, Delta


class Kind(StrEnum):
    """What a part is."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Part:
    """A part so far. ``text``: what was written, of a call its arguments (JSON where the model writes JSON)."""

    kind: Kind
    index: int
    text: str = ""
    name: str = ""  # of a call
    id: str = ""  # of a call


class Event(NamedTuple):
    """A part opens, gains text, or closes. Each opens once and closes once, before the next one opens."""

    verb: str  # "open" | "more" | "close"
    part: Part
    text: str = ""


class AnswerParts:
    """Takes the text of one answer in pieces; ``plan`` None: all of it is text."""

    def __init__(self, plan: OutputPlan | None, new_call_id: Callable[[], str]) -> None:
        self.parts: list[Part] = []
        self._plan = plan
        self._parser = None if plan is None else plan.parser()
        self._new_call_id = new_call_id
        self._is_open = False

    @property
    def has_calls(self) -> bool:
        return any(part.kind is Kind.CALL for part in self.parts)

    def feed(self, text: str, *, last: bool) -> list[Event]:
        """Take more text; ``last`` ends the answer."""
        events: list[Event] = []
        for delta in self._deltas(text, last):
            self._add(events, delta)
        if last:
            self._close(events)
        return events

    def _deltas(self, text: str, last: bool) -> list[Delta]:
        if self._parser is None:
            return [ContentDelta(text)]
        deltas = self._parser.feed(text) if text else []
        return deltas + self._parser.finish() if last else deltas

    def _add(self, events: list[Event], delta: Delta) -> None:
        if isinstance(delta, CallDelta):
            assert self._plan is not None
            if self._plan.max_calls is not None and delta.call >= self._plan.max_calls:
                return
            if delta.name is not None:
                self._open(events, Kind.CALL, delta.name, delta.id or self._new_call_id())
            self._more(events, delta.arguments)
            return
        kind = Kind.TEXT if isinstance(delta, ContentDelta) else Kind.REASONING
        if not delta.text or (
            kind is Kind.REASONING and self._plan is not None and not self._plan.with_reasoning
        ):
            return
        if not self._is_open or self.parts[-1].kind is not kind:
            self._open(events, kind)
        self._more(events, delta.text)

    def _open(self, events: list[Event], kind: Kind, name: str = "", call_id: str = "") -> None:
        self._close(events)
        self.parts.append(Part(kind, len(self.parts), name=name, id=call_id))
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
