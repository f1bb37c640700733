"""Calls without their format's marks: an answer that is, as a whole, one JSON object or lines of them.

Some models (Qwen2.5-Coder) write ``{"name": …, "arguments": {…}}`` where their template has ``<tool_call>`` around it,
or a code block of Markdown, ```` ```json ````. A block of another language is no call.
Whether the answer is such a call is known at its end alone, so its text is held back while it can still be one: each
key, the name of an offered tool and the form of JSON are checked as they come. Text that was shown is never taken back.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import NamedTuple

from quire.text.output.reader import Reader, Wait
from quire.text.output.sections import NotCalls

_ARGUMENTS = ("arguments", "parameters")
_KEYS = tuple(f'"{key}"' for key in ("name", *_ARGUMENTS, "id", "type"))
_PRIMITIVE = frozenset("-0123456789tfn")
_MAX_DEPTH = 64
_FENCE = "```"
_FENCE_OPENS = (f"{_FENCE}json\n", f"{_FENCE}\n")
OPENINGS = ("{", *_FENCE_OPENS)


class UnmarkedCall(NamedTuple):
    """One call. ``arguments``: an object in JSON, as the model wrote it."""

    name: str
    arguments: str
    id: str | None


def unmarked_calls(
    reader: Reader, names: Collection[str], drops: tuple[str, ...]
) -> Wait[list[UnmarkedCall]]:
    """Read the whole text, up to its end. ``names``: the tools that are offered; ``drops``: marks without meaning.

    Raises:
        NotCalls: the text is anything else.
    """
    calls: list[UnmarkedCall] = []
    quoted, is_fenced = tuple(map(json.dumps, names)), False
    while True:
        yield from reader.space()
        mark = yield from reader.starts((*drops, *((_FENCE,) if is_fenced else _FENCE_OPENS)))
        if mark is None:
            if (yield from reader.peek()) == "" and calls and not is_fenced:
                return calls
            calls.append((yield from _call(reader, quoted)))
            continue
        reader.take(len(mark))
        if mark not in drops:
            is_fenced = not is_fenced


def _call(reader: Reader, names: tuple[str, ...]) -> Wait[UnmarkedCall]:
    name = arguments = call_id = None
    yield from _expect(reader, "{")
    while True:
        key = yield from _one_of(reader, _KEYS)
        yield from _expect(reader, ":")
        if key == '"name"' and name is None:
            name = json.loads((yield from _one_of(reader, names)))
        elif key[1:-1] in _ARGUMENTS and arguments is None:
            arguments = yield from _arguments(reader)
        elif key in ('"id"', '"type"'):
            text = yield from _text(reader)
            call_id = text if key == '"id"' else call_id
        else:
            raise NotCalls
        yield from reader.space()
        char = yield from reader.peek()
        if char == "}" and name is not None and arguments is not None:
            reader.take(1)
            return UnmarkedCall(name, arguments, call_id)
        yield from _expect(reader, ",")


def _arguments(reader: Reader) -> Wait[str]:
    """Read an object, the same inside of a string, or null, which is an empty object."""
    parts: list[str] = []
    yield from _value(reader, parts, 0)
    raw = "".join(parts)
    value = _loaded(raw)
    if isinstance(value, str):
        raw, value = value, _loaded(value)
    if value is not None and not isinstance(value, dict):
        raise NotCalls
    return "{}" if value is None else raw


def _loaded(raw: str) -> object:
    try:
        value: object = json.loads(raw)
    except ValueError:
        raise NotCalls from None
    return value


def _value(reader: Reader, parts: list[str], depth: int) -> Wait[None]:
    """Read one value of JSON into ``parts``; what cannot be one any more ends at once."""
    yield from reader.space()
    char = yield from reader.peek()
    if char == '"':
        parts.append(json.dumps((yield from _text(reader)), ensure_ascii=False))
        return
    if char not in ("{", "["):
        if char not in _PRIMITIVE or char == "":
            raise NotCalls
        yield from reader.json(parts.append)
        return
    if depth > _MAX_DEPTH:
        raise NotCalls
    parts.append(reader.take(1))
    num_before, end = len(parts), "}" if char == "{" else "]"
    yield from reader.space()
    while (yield from reader.peek()) != end:
        if len(parts) > num_before:
            yield from _expect(reader, ",")
            parts.append(", ")
        if char == "{":
            parts.append(json.dumps((yield from _text(reader)), ensure_ascii=False))
            yield from _expect(reader, ":")
            parts.append(": ")
        yield from _value(reader, parts, depth + 1)
        yield from reader.space()
    parts.append(reader.take(1))


def _text(reader: Reader) -> Wait[str]:
    if (yield from reader.peek()) != '"':
        raise NotCalls
    value = _loaded((yield from reader.string()) or "")
    if not isinstance(value, str):
        raise NotCalls
    return value


def _expect(reader: Reader, char: str) -> Wait[None]:
    """Pass white space, ``char`` and white space."""
    yield from reader.space()
    if (yield from reader.peek()) != char:
        raise NotCalls
    reader.take(1)
    yield from reader.space()


def _one_of(reader: Reader, texts: tuple[str, ...]) -> Wait[str]:
    prefix = yield from reader.starts(texts)
    if prefix is None:
        raise NotCalls
    return reader.take(len(prefix))
