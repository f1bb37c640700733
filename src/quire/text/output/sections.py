"""Calls written as JSON: one generator over a `Reader` per way of writing them (others: `tagged`, `literals`).

A generator is called at the beginning of a section of calls and returns at its end. For text that is not a call it
raises `NotCalls` without having emitted any of it; the text is content then. Once the name of a call is emitted, the
call is never taken back: what follows is its arguments as the model wrote them, well-formed or not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from quire.text.output.formats import JsonCalls, NamedCalls
from quire.text.output.reader import Reader, Wait

# (name, id) begins a call; (text) adds to its arguments.
Begin = Callable[[str, str | None], None]
Arguments = Callable[[str], None]
_BETWEEN = ",;"


class NotCalls(Exception):
    """The text since the reader's mark is not a call."""


@dataclass(slots=True)
class Calls:
    """What a section's generator works on. ``known``: tool names that make a call in a section without an opening."""

    reader: Reader
    _begin: Begin
    arguments: Arguments
    closes: tuple[str, ...]
    known: Collection[str] | None = None
    drops: tuple[str, ...] = ()  # marks that cannot stand in the header of a call

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Emit the name of a call, which is never taken back."""
        if not name or (self.known is not None and name not in self.known):
            raise NotCalls
        self.reader.forget()
        self._begin(name, call_id)

    def closed(self) -> Wait[bool]:
        """Pass the end of the section if it comes next; return whether it did."""
        if not self.closes:
            return False
        marker = yield from self.reader.starts(self.closes)
        if marker is not None:
            self.reader.take(len(marker))
        return marker is not None

    def opened(self, opening: str, count: int) -> Wait[bool]:
        """Pass the opening of the next call, behind ``count`` others; return whether there is one.

        Raises:
            NotCalls: there is none, and none came before.
        """
        if (yield from self.reader.starts((opening,))) is None:
            if count:
                return False
            raise NotCalls
        if count:
            self.reader.mark()
        self.reader.take(len(opening))
        return True


def json_calls(calls: Calls, form: JsonCalls) -> Wait[None]:
    """Read one object, several, or a list of them."""
    reader, count, in_list = calls.reader, 0, False
    while True:
        yield from reader.space()
        if (yield from calls.closed()):
            return
        char = yield from reader.peek()
        if char == "{":
            if count:
                reader.mark()
            yield from _object(calls, form)
            count += 1
        elif char == "[" and not in_list and not count:
            reader.take(1)
            in_list = True
        elif char == "]" and in_list:
            reader.take(1)
            in_list = False
            if not calls.closes:
                return
        elif char and char in _BETWEEN and count:
            reader.take(1)
        elif count:
            return
        else:
            raise NotCalls


def _object(calls: Calls, form: JsonCalls) -> Wait[None]:
    """Read ``{"name": …, "arguments": …}``, with its keys in any order."""
    reader = calls.reader
    reader.take(1)
    early: list[str] = []  # arguments that came before the name
    name: str | None = None
    call_id: str | None = None
    has_arguments = False
    while True:
        yield from reader.space()
        char = yield from reader.peek()
        if char in ("}", ""):
            break
        if char == ",":
            reader.take(1)
            continue
        key = yield from _key(calls, has_name=name is not None)
        if key is None:
            return
        if form.name_is_key:
            calls.begin(key)
            name, has_arguments = key, True
            yield from _arguments(calls, calls.arguments)
        elif key in form.name_keys and name is None:
            name = _text((yield from reader.string()))
            calls.begin(name, call_id)
            calls.arguments("".join(early))
        elif key in form.argument_keys and not has_arguments:
            has_arguments = True
            yield from _arguments(calls, early.append if name is None else calls.arguments)
        else:
            parts: list[str] = []
            yield from reader.json(parts.append)
            if key == "id" and name is None:
                call_id = _text("".join(parts))
    if name is None:
        raise NotCalls
    if char == "}":
        reader.take(1)
        if not has_arguments:
            calls.arguments("{}")


def _key(calls: Calls, *, has_name: bool) -> Wait[str | None]:
    """Read ``"key":``. If there is none, the call is over (``has_name``) or there was no call."""
    reader = calls.reader
    char = yield from reader.peek()
    raw = (yield from reader.string()) if char == '"' else None
    yield from reader.space()
    if raw is not None and (yield from reader.peek()) == ":":
        reader.take(1)
        yield from reader.space()
        return _text(raw)
    if not has_name:
        raise NotCalls
    return None


def _arguments(calls: Calls, emit: Arguments) -> Wait[None]:
    """Read the arguments; some models write the object inside a string, and null for none."""
    char = yield from calls.reader.peek()
    if char == '"':
        emit(_text((yield from calls.reader.string())) or "{}")
    elif char == "n":
        parts: list[str] = []
        yield from calls.reader.json(parts.append)
        text = "".join(parts)
        emit("{}" if text == "null" else text)
    else:
        yield from calls.reader.json(emit)


def named_calls(calls: Calls, form: NamedCalls) -> Wait[None]:
    """Read ``open header args JSON close``. The caller has passed the section's opening, but not the first ``open``."""
    reader, header, count = calls.reader, re.compile(form.header), 0
    while True:
        yield from reader.space()
        if (yield from calls.closed()):
            return
        if not (yield from calls.opened(form.open, count)):
            return
        parts: list[str] = []
        stops = (form.args, *calls.closes, *calls.drops, *((form.close,) if form.close else ()))
        stop = yield from reader.until(stops, parts.append)
        match = header.fullmatch("".join(parts))
        if stop != form.args or match is None:
            raise NotCalls
        groups = match.groupdict()
        calls.begin(groups["name"], groups.get("id") or None)
        count += 1
        yield from reader.space()
        if form.inside:
            yield from _inside(calls, form.inside)
        elif (yield from reader.peek()) in ("{", "["):
            yield from reader.json(calls.arguments)
        elif (yield from reader.starts(("null",))) is not None:
            reader.take(len("null"))
            calls.arguments("{}")
        elif form.close:  # arguments that are not JSON are emitted unchanged
            yield from reader.until((form.close,), calls.arguments)
            continue
        if form.close:
            # Text between the JSON and the end of the call is dropped.
            yield from reader.until((form.close, *calls.closes), lambda text: None)


def _inside(calls: Calls, key: str) -> Wait[None]:
    """Read an object of which the value of ``key`` is the arguments."""
    reader = calls.reader
    if (yield from reader.peek()) == "{":
        reader.take(1)
    while True:
        yield from reader.space()
        char = yield from reader.peek()
        if char == ",":
            reader.take(1)
            continue
        name = (yield from _key(calls, has_name=True)) if char == '"' else None
        if name is None:
            if char == "}":
                reader.take(1)
            return
        if name == key:
            yield from _arguments(calls, calls.arguments)
        else:
            yield from reader.json(lambda text: None)


def _text(raw: str | None) -> str:
    """Return the value of a JSON string, "" if it is not one."""
    try:
        value = json.loads(raw or "")
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
