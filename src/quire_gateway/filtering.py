"""`Filtering`: one answer on its way through the filters; a stream is filtered by sentences.

    events in ──► held, until every text in them has been filtered ──► events out, in their order

A text is cut behind a sentence or a line, or at ``hold_chars``. Events whose texts passed go out byte for byte; where a
sentence was changed, the event that it began in gets the new text and the others less. Choices do not wait for one
another. The object lives as long as the exchange: a stream that moves to another replica is filtered once.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from prometheus_client.core import Metric
from starlette.types import Scope

from quire.http.call import call_of
from quire.http.refusals import OLLAMA_ROOT, HttpError, Refusal
from quire_gateway.answer import AnswerStep
from quire_gateway.answer_texts import Channel, Piece, kind_of, pieces_of
from quire_gateway.exchange import Exchange
from quire_gateway.filters import About, Filters
from quire_gateway.metrics import counter
from quire_gateway.stage import Proceed, Stage

PRECEDING_CHARS = 200  # of the text before, that a hook is shown
_FRAME = re.compile(rb".*?(?:\r?\n\r?\n|\Z)", re.DOTALL)
_LINE = re.compile(rb".*?(?:\n|\Z)", re.DOTALL)  # of Ollama's API
_ENDS = re.compile(r"[.!?…][\"'”’)\]]*\s+|[。！？]|\n")


@dataclass(slots=True)
class _Segment:
    """A part of a text that was filtered at once; offsets in characters from the channel's beginning."""

    start: int
    end: int
    raw: str
    changed: str | None


@dataclass(slots=True)
class _Text:
    """One channel of a stream."""

    pending: str = ""  # not filtered yet
    num_chars: int = 0  # that came
    preceding: str = ""
    out: list[str] = field(default_factory=list)
    is_changed: bool = False
    has_ended: bool = False  # no more text comes
    segments: deque[_Segment] = field(default_factory=deque)

    @property
    def num_filtered(self) -> int:
        return self.num_chars - len(self.pending)

    def between(self, start: int, end: int) -> str:
        """Return what the event with the characters ``start`` … ``end`` has after the filters."""
        parts = []
        for segment in self.segments:
            if segment.end <= start or segment.start >= end:
                continue
            if segment.changed is None:
                parts.append(segment.raw[max(start - segment.start, 0) : end - segment.start])
            elif start <= segment.start:
                parts.append(segment.changed)
        while self.segments and self.segments[0].end < end:
            self.segments.popleft()
        return "".join(parts)

    def is_known(self, end: int, *, is_empty: bool) -> bool:
        """Whether the text up to a place has been filtered, and behind an empty one what follows it."""
        return end < self.num_filtered or (end == self.num_filtered and (self.has_ended or not is_empty))

    def is_changed_at(self, place: int) -> bool:
        """Whether the filters changed the text before or after a place."""
        return any(s.changed is not None and s.start <= place <= s.end for s in self.segments)


@dataclass(slots=True)
class _Event:
    """An event, its texts with their places in the channels, and the choice that it belongs to (None: all)."""

    raw: bytes
    value: dict[str, Any] | None
    texts: list[tuple[Piece, int, int]]
    choice: int | None
    is_changed: bool = False


class FilterStage(Stage):
    """Shows requests to the filters, and has their answers pass them."""

    def __init__(self, filters: Filters) -> None:
        self.filters = filters

    def metrics(self) -> Iterable[Metric]:
        yield counter(
            "quire:gateway_filter_verdicts",
            "Verdicts by filter, before or after the model.",
            ("filter", "when", "verdict"),
            self.filters.counts,
        )

    async def serve(self, exchange: Exchange, proceed: Proceed) -> None:
        """Raises `HttpError`: a filter refuses the request."""
        filters, request = self.filters, exchange.request
        assert request is not None
        model = exchange.targets[0].model
        about = About(exchange.request_id, exchange.path, model, exchange.tenant, exchange.key)
        if filters.reads_requests:
            changed = await filters.before(about, request.plain_body)
            exchange.request = request if changed is None else request.changed_to(changed)
        if filters.reads_answers:
            exchange.answer.through(Filtering(filters, about))
        await proceed()

    def step(self, scope: Scope) -> Filtering | None:
        """Return what the answer to a question about a stored response passes; its replica knows no filters."""
        call = call_of(scope)
        owner = (call.tenant, call.key.name) if call.key is not None else ("", "")
        about = About(call.request_id, scope["path"], "", *owner)
        return Filtering(self.filters, about) if self.filters.reads_answers else None


class Filtering(AnswerStep):
    """The filters around one answer."""

    def __init__(self, filters: Filters, about: About) -> None:
        self._filters = filters
        self._about = about
        self._is_lines = about.path.startswith(OLLAMA_ROOT)
        self.restart()

    def restart(self) -> None:
        self._texts: dict[Channel, _Text] = {}
        self._waiting: list[_Event] = []
        self._refusal: HttpError | None = None

    async def filtered_body(self, body: bytes) -> bytes:
        """Return a whole answer after the filters: the same bytes where they change nothing.

        Raises:
            HttpError: a filter refuses it.
        """
        value = msgspec.json.decode(body)
        is_changed = _without_ids(value) if isinstance(value, dict) else False
        for piece in pieces_of(value) if isinstance(value, dict) else ():
            changed = await self._filters.after(self._about_text(piece.channel), piece.text)
            if changed is not None:
                _replace(piece, changed)
                is_changed = True
        return msgspec.json.encode(value) if is_changed else body

    async def document(self, status: int, content_type: str, body: bytes) -> bytes:
        return await self.filtered_body(body) if status == 200 and "json" in content_type else body

    async def events(self, frames: bytes) -> bytes:
        try:
            for match in (_LINE if self._is_lines else _FRAME).finditer(frames):
                if match[0]:
                    await self._take(match[0])
        except HttpError as error:
            self._refusal = error
        return b"".join(self._released())

    async def ended(self, rest: bytes) -> bytes:
        out = await self.events(rest)
        if self._refusal is None:
            try:
                await self._flush(list(self._texts), have_ended=True)
            except HttpError as error:
                self._refusal = error
        return out + b"".join(self._released())

    def check(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    async def _take(self, raw: bytes) -> None:
        value = _parse_event(raw, is_line=self._is_lines)
        if value is None:
            if b"data:" in raw:  # [DONE]
                await self._flush(list(self._texts), have_ended=True)
            self._waiting.append(_Event(raw, None, [], None))
            return
        texts = []
        for piece in pieces_of(value, with_tokens=True):
            text = self._texts.setdefault(piece.channel, _Text())
            start = text.num_chars
            if not piece.repeats or not start:
                text.pending += piece.text
                text.num_chars += len(piece.text)
            texts.append((piece, start, text.num_chars))
        self._waiting.append(_Event(raw, value, texts, _choice_index(value), _without_ids(value)))
        ended = _ended(value, list(self._texts))
        repeated = [piece.channel for piece, _, _ in texts if piece.repeats]
        await self._flush(repeated)
        await self._flush(ended, have_ended=True)
        for piece, _, _ in texts:
            await self._filter_sentences(piece.channel)

    async def _flush(self, channels: list[Channel], *, have_ended: bool = False) -> None:
        for channel in channels:
            await self._filter(channel, len(self._texts[channel].pending))
            self._texts[channel].has_ended |= have_ended

    async def _filter_sentences(self, channel: Channel) -> None:
        """Filter up to the last end of a sentence, or, where there is too much without one, of a word."""
        pending = self._texts[channel].pending
        cut = max((m.end() for m in _ENDS.finditer(pending)), default=0)
        if len(pending) - cut > self._filters.hold_chars:
            cut = max(pending.rfind(" "), cut) or len(pending)
        await self._filter(channel, cut)

    async def _filter(self, channel: Channel, num_chars: int) -> None:
        text = self._texts[channel]
        if not num_chars:
            return
        raw, start = text.pending[:num_chars], text.num_filtered
        changed = await self._filters.after(self._about_text(channel, text.preceding), raw)
        text.pending = text.pending[num_chars:]
        text.segments.append(_Segment(start, start + num_chars, raw, changed))
        text.preceding = (text.preceding + raw)[-PRECEDING_CHARS:]
        text.out.append(raw if changed is None else changed)
        text.is_changed |= changed is not None

    def _about_text(self, channel: Channel, preceding: str = "") -> About:
        return replace(self._about, choice=channel[0], kind=kind_of(channel), preceding=preceding)

    def _released(self) -> Iterator[bytes]:
        """Yield the events that are filtered, and have none before them of the same choice that is not."""
        waiting_events: list[_Event] = []
        waiting: set[int | None] = set()
        for event in self._waiting:
            is_behind = None in waiting or event.choice in waiting or (event.choice is None and waiting)
            if is_behind or not all(self._is_known(*text) for text in event.texts):
                waiting_events.append(event)
                waiting.add(event.choice)
            else:
                yield self._written(event)
        self._waiting = waiting_events

    def _is_known(self, piece: Piece, _: int, end: int) -> bool:
        return self._texts[piece.channel].is_known(end, is_empty=_is_empty(piece))

    def _written(self, event: _Event) -> bytes:
        is_changed = event.is_changed
        for piece, start, end in event.texts:
            text = self._texts[piece.channel]
            if piece.repeats:
                new = "".join(text.out) if text.is_changed else piece.text
            else:
                new = text.between(start, end)
            if new != piece.text or (_is_empty(piece) and text.is_changed_at(start)):
                _replace(piece, new)
                is_changed = True
        if not is_changed:
            return event.raw
        if self._is_lines:
            return msgspec.json.encode(event.value) + b"\n"
        named = b"".join(
            line + b"\n" for line in event.raw.splitlines() if line and not line.startswith(b"data:")
        )
        return b"%bdata: %b\n\n" % (named, msgspec.json.encode(event.value))


def _is_empty(piece: Piece) -> bool:
    """Whether it has tokens of the text around it, and none of its own."""
    return not piece.holder[piece.key]


def _replace(piece: Piece, text: str) -> None:
    try:
        piece.replace(text)
    except msgspec.DecodeError:
        message = "A filter made the arguments of a tool call into something that is not JSON."
        raise HttpError(Refusal(503, message, code="filter_failed")) from None


def _without_ids(value: dict[str, Any]) -> bool:
    """Remove the ids of the text before the filters, which Ollama's answers end with; return whether there were any."""
    return "done" in value and value.pop("context", None) is not None


def _parse_event(raw: bytes, *, is_line: bool) -> dict[str, Any] | None:
    """Return the JSON of an event. Raises `ValueError` for data that is none: it cannot be filtered."""
    lines = [line[5:].strip() for line in raw.splitlines() if line.startswith(b"data:")]
    data = raw.strip() if is_line else b"\n".join(lines)
    if not data or data == b"[DONE]":
        return None
    value = msgspec.json.decode(data)
    return value if isinstance(value, dict) else None


def _choice_index(value: dict[str, Any]) -> int | None:
    choices = value.get("choices")
    if isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0].get("index"), int):
        return int(choices[0]["index"])
    return None


def _ended(value: dict[str, Any], channels: list[Channel]) -> list[Channel]:
    """Return the channels of which an event says that no more comes."""
    choices = value.get("choices")
    if isinstance(choices, list):
        done = {choice.get("index", 0) for choice in choices if choice.get("finish_reason") is not None}
        return [channel for channel in channels if channel[0] in done or not choices]
    kind = value.get("type")
    if kind == "content_block_stop":
        return [channel for channel in channels if channel[0] == value.get("index")]
    if kind is None and "done" in value:
        return channels if value["done"] else []
    if isinstance(value.get("token"), dict):  # TGI's
        return channels if value.get("generated_text") is not None else []
    if "content" in value and "stop" in value:  # llama.cpp's
        return channels if value["stop"] else []
    goes_on = isinstance(kind, str) and (
        kind in ("ping", "message_start", "content_block_start", "content_block_delta")
        or kind.startswith("response.")
    )
    return [] if goes_on else channels
