"""Gemma 4's calls: ``call:NAME{key:<|"|>text<|"|>,list:[1,2],object:{a:true}}``.

A call goes out when it is complete.
"""

from __future__ import annotations

import json
import re
from typing import Any

from quire.text.output.reader import Wait
from quire.text.output.sections import Calls, NotCalls

_QUOTE = '<|"|>'
_HEADER = re.compile(r"\s*call:\s*(?P<name>[^\s{]+)\s*(?=\{)")
_KEY = re.compile(r"\s*([^\s:{}\[\],]+)\s*:")
_SPACE = re.compile(r"\s*")
_PRIMITIVE = re.compile(r"[^,}\]]+")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


def gemma_calls(calls: Calls) -> Wait[None]:
    """One call behind each opening."""
    parts: list[str] = []
    yield from calls.reader.until(calls.closes, parts.append)
    text = "".join(parts)
    header = _HEADER.match(text)
    if header is None:
        raise NotCalls
    try:
        arguments, _ = _value(text, header.end())
    except (IndexError, ValueError, RecursionError):
        raise NotCalls from None
    calls.begin(header["name"])
    calls.arguments(json.dumps(arguments, ensure_ascii=False))


def _value(text: str, at: int) -> tuple[Any, int]:
    """(value, place behind it); raises IndexError or ValueError for what is none."""
    at = _space(text, at)
    if text.startswith(_QUOTE, at):
        end = text.index(_QUOTE, at + len(_QUOTE))
        return text[at + len(_QUOTE) : end], end + len(_QUOTE)
    if text[at] in "{[":
        return _container(text, at)
    found = _PRIMITIVE.match(text, at)
    if found is None:
        raise ValueError(text[at])
    word = found.group().strip()
    return (_WORDS[word] if word in _WORDS else json.loads(word)), found.end()


def _container(text: str, at: int) -> tuple[Any, int]:
    is_object = text[at] == "{"
    close = "}" if is_object else "]"
    items: dict[str, Any] = {}
    values: list[Any] = []
    at = _space(text, at + 1)
    while text[at] != close:
        if is_object:
            key = _KEY.match(text, at)
            if key is None:
                raise ValueError(text[at])
            items[key.group(1)], at = _value(text, key.end())
        else:
            value, at = _value(text, at)
            values.append(value)
        at = _space(text, at)
        if text[at] == ",":
            at = _space(text, at + 1)
        elif text[at] != close:
            raise ValueError(text[at])
    return (items if is_object else values), at + 1


def _space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()
