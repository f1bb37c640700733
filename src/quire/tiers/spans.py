"""Blocks read from segments in spans: one system call for what lies together, checked while the next one is read."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import NamedTuple

from quire.tiers.record import HEADER_BYTES, is_whole
from quire.tiers.segment import MAX_BUFFERS, Entry, SegmentFile

# Large enough for the bandwidth of a disk, and small enough that the first check begins early.
SPAN_BYTES = 4 << 20


class Place(NamedTuple):
    """Where the index says that a block is."""

    file: SegmentFile
    entry: Entry


@dataclass(slots=True)
class Span:
    """Blocks next to each other in one segment, with the buffers that they go to."""

    file: SegmentFile
    entries: list[Entry]
    headers: list[bytearray]
    payloads: list[memoryview]

    @property
    def num_bytes(self) -> int:
        return self.entries[-1].end - self.entries[0].offset

    def takes(self, place: Place) -> bool:
        """Whether a block follows the last one directly, and the span is not full."""
        follows = place.file is self.file and place.entry.offset == self.entries[-1].end
        fits = (
            self.num_bytes + place.entry.num_bytes <= SPAN_BYTES and 2 * len(self.entries) + 2 <= MAX_BUFFERS
        )
        return follows and fits

    def add(self, entry: Entry, into: memoryview) -> None:
        self.entries.append(entry)
        self.headers.append(bytearray(HEADER_BYTES))
        self.payloads.append(into)

    def read(self) -> int:
        """Fill headers and buffers; return the bytes read. Raises `OSError`."""
        buffers = [part for pair in zip(self.headers, self.payloads, strict=True) for part in pair]
        return os.preadv(self.file.fd, buffers, self.entries[0].offset)

    def num_whole(self, num_read: int) -> int:
        """Return how many leading blocks are whole, of which ``num_read`` bytes were read."""
        start = self.entries[0].offset
        for index, (entry, header, payload) in enumerate(
            zip(self.entries, self.headers, self.payloads, strict=True)
        ):
            if entry.end - start > num_read or not is_whole(self.file.root, entry.key, header, payload):
                return index
        return len(self.entries)


def spans_of(places: Sequence[Place], into: Sequence[memoryview]) -> Iterator[Span]:
    """Yield spans that have all blocks in their order."""
    span: Span | None = None
    for place, buffer in zip(places, into, strict=True):
        if span is None or not span.takes(place):
            if span is not None:
                yield span
            span = Span(place.file, [], [], [])
        span.add(place.entry, buffer)
    if span is not None:
        yield span


def read_ahead(
    spans: Iterator[Span], executor: Executor
) -> Generator[tuple[Span, int | OSError], None, None]:
    """Yield each span with the bytes read of it, or the error; the next one is read meanwhile.

    A caller that stops early must close the generator, which waits for the read that is under way.
    """
    span = next(spans, None)
    following: Span | None = next(spans, None)
    if span is None:
        return
    result = _read(span)
    while True:
        pending: Future[int | OSError] | None = None
        if following is not None:
            try:
                pending = executor.submit(_read, following)
            except RuntimeError:  # the store was closed
                following = None
        try:
            yield span, result
        finally:
            upcoming = pending.result() if pending is not None else 0
        if following is None:
            return
        span, result, following = following, upcoming, next(spans, None)


def _read(span: Span) -> int | OSError:
    try:
        return span.read()
    except OSError as error:
        return error
