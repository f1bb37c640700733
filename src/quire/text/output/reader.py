"""`Reader`: text that arrives in pieces, read by generators that yield while they wait for more.

A reader's decisions depend only on the text, never on where it was cut: text is held back only while it may be the
beginning of a marker, and is emitted as soon as it cannot be.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]  # yields while it waits for text, then returns a T
Emit = Callable[[str], None]

_IN_STRING = re.compile(r'["\\]')
_STRUCTURE = re.compile(r'["{}\[\]]')
_PRIMITIVE_END = re.compile(r"[\s,}\]]")


class Reader:
    """A cursor over the text so far. Text that was read is forgotten, except after ``mark``, for `back`."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        self._closed = False

    def add(self, text: str) -> None:
        """Append text."""
        cut = self._at if self._mark is None else self._mark
        if cut:
            self._text = self._text[cut:]
            self._at -= cut
            self._mark = None if self._mark is None else 0
        self._text += text

    def close(self) -> None:
        """Say that no more text follows."""
        self._closed = True

    def mark(self) -> None:
        """Remember this position for `back`."""
        self._mark = self._at

    def forget(self) -> None:
        """Forget the marked position."""
        self._mark = None

    def back(self) -> None:
        """Return to the marked position."""
        assert self._mark is not None
        self._at, self._mark = self._mark, None

    def rewind(self, marker: str) -> None:
        """Move back before ``marker``, which `until` has just passed."""
        self._at -= len(marker)

    def peek(self) -> Wait[str]:
        """Return the next character without passing it; "" at the end."""
        while self._at >= len(self._text):
            if self._closed:
                return ""
            yield
        return self._text[self._at]

    def space(self) -> Wait[str]:
        """Pass white space and return it."""
        taken = ""
        while (char := (yield from self.peek())).isspace():
            self._at += 1
            taken += char
        return taken

    def take(self, count: int) -> str:
        """Pass and return ``count`` characters, which `peek` or `starts` has seen."""
        self._at += count
        return self._text[self._at - count : self._at]

    def starts(self, markers: Sequence[str]) -> Wait[str | None]:
        """Return the longest marker that comes next, or None, without passing it."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, markers), default=0)]
            fits = [m for m in markers if rest.startswith(m)]
            longer = [m for m in markers if len(m) > len(rest) and m.startswith(rest)]
            if self._closed or not longer:
                return max(fits, key=len, default=None)
            yield

    def until(self, markers: tuple[str, ...], emit: Emit) -> Wait[str | None]:
        """Emit text up to the earliest marker, then pass and return the marker; None at the end of the text."""
        search = _search(markers)
        while True:
            match = search.search(self._text, self._at)
            at, marker = (match.start(), match.group()) if match else (len(self._text), None)
            open_at = len(self._text) if self._closed else partial_mark(self._text, self._at, markers)
            if marker is not None and at < open_at:
                self._emit(at, emit)
                self._at = at + len(marker)
                return marker
            self._emit(min(at, open_at), emit)
            if self._closed:
                return None
            yield

    def string(self) -> Wait[str | None]:
        """Read a JSON string with its quotes; None if the text ends inside it."""
        parts: list[str] = []
        complete = yield from self.json(parts.append)
        return "".join(parts) if complete else None

    def json(self, emit: Emit) -> Wait[bool]:
        """Emit one JSON value while it is written, without checking it; False if the text ends inside it."""
        depth, in_string, primitive = 0, False, (yield from self.peek()) not in ("{", "[", '"')
        while True:
            if (yield from self.peek()) == "":
                return primitive
            if primitive:
                match = _PRIMITIVE_END.search(self._text, self._at)
                self._emit(match.start() if match else len(self._text), emit)
                if match:
                    return True
                continue
            match = (_IN_STRING if in_string else _STRUCTURE).search(self._text, self._at)
            if match is None:
                self._emit(len(self._text), emit)
                continue
            end = match.end()
            char = match.group()
            if char == "\\":
                if end >= len(self._text) and not self._closed:  # the escaped character is still to come
                    self._emit(match.start(), emit)
                    yield
                    continue
                end = min(end + 1, len(self._text))
            elif char == '"':
                in_string = not in_string
            else:
                depth += 1 if char in "{[" else -1
            self._emit(end, emit)
            if depth == 0 and not in_string:
                return True

    def _emit(self, end: int, emit: Emit) -> None:
        if end > self._at:
            emit(self._text[self._at : end])
            self._at = end


@lru_cache(maxsize=256)
def _search(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern that finds the first marker; of several at one position, the longest."""
    return re.compile("|".join(re.escape(m) for m in sorted(markers, key=len, reverse=True)) or "(?!)")


@lru_cache(maxsize=256)
def _prefixes(markers: tuple[str, ...]) -> frozenset[str]:
    """Return all proper prefixes of the markers."""
    return frozenset(m[:end] for m in markers for end in range(1, len(m)))


def partial_mark(text: str, start: int, markers: tuple[str, ...]) -> int:
    """Return the first position from which the rest of the text may be the beginning of a marker."""
    prefixes = _prefixes(markers)
    longest = max(map(len, markers), default=1) - 1
    for at in range(max(start, len(text) - longest), len(text)):
        if text[at:] in prefixes:
            return at
    return len(text)


class Trimmed:
    """The text of a section. White space at its end is held until more text follows; before another section it is
    dropped.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._pending = ""
        self._drop_leading = False
        self.shown = False  # whether there was more than white space

    def add(self, text: str) -> None:
        if self._drop_leading:
            text = text.lstrip()
            if not text:
                return
            self._drop_leading = False
        text = self._pending + text
        stripped = text.rstrip()
        self._pending = text[len(stripped) :]
        if stripped:
            self.shown = True
            self._emit(stripped)

    def after_section(self) -> None:
        """Drop white space before and after this position, where a section begins or ends."""
        self._pending = ""
        self._drop_leading = True

    def end(self) -> None:
        """End the text: emit white space that was held."""
        if self._pending:
            self._emit(self._pending)
            self._pending = ""
