"""Calls written as Python, or in Gemma's form: each is emitted when it is complete."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from quire.text.output.formats import GemmaCalls, Tools
from quire.text.output.reader import Reader, Wait
from quire.text.output.sections import Calls, NotCalls


def python_calls(calls: Calls, tools: Tools) -> Wait[None]:
    """Read ``[f(a=1, b="x"), g()]``, or one call a line; a call is emitted when it is complete."""
    reader, count = calls.reader, 0
    yield from reader.space()
    in_list = (yield from reader.peek()) == "["
    if in_list:
        reader.take(1)
    while True:
        yield from reader.space()
        if (yield from calls.closed()):
            return
        char = yield from reader.peek()
        if char == "]" and in_list:
            reader.take(1)
            in_list = False
            if not calls.closes:
                return
        elif char == "," and count:
            reader.take(1)
        elif char.isidentifier():
            if count:
                reader.mark()
            name, arguments = _parse_call((yield from _source(reader)), tools)
            calls.begin(name)
            calls.arguments(_json(arguments))
            count += 1
        elif count:
            return
        else:
            raise NotCalls


def _source(reader: Reader) -> Wait[str]:
    """Read the text of one call up to its closing parenthesis."""
    parts: list[str] = []
    depth, quote = 0, ""
    while (char := (yield from reader.peek())) != "":
        parts.append(reader.take(1))
        if quote:
            if char == "\\" and (yield from reader.peek()):
                parts.append(reader.take(1))
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth <= 0:
                return "".join(parts)
        elif depth == 0 and not (char.isidentifier() or char.isdigit() or char in ".- "):
            raise NotCalls
    raise NotCalls


def _parse_call(source: str, tools: Tools) -> tuple[str, dict[str, Any]]:
    name, _, inside = source.partition("(")
    try:
        # JSON's escaped slash, which Python does not know
        call = ast.parse("f(" + re.sub(r"(?<!\\)((?:\\\\)*)\\/", r"\1/", inside), mode="eval").body
        assert isinstance(call, ast.Call)
        positional = list(tools.get(name.strip(), {}).get("properties") or {})[: len(call.args)]
        if len(positional) != len(call.args) or any(keyword.arg is None for keyword in call.keywords):
            raise NotCalls
        arguments = {key: _literal(value) for key, value in zip(positional, call.args, strict=True)}
        arguments.update({str(keyword.arg): _literal(keyword.value) for keyword in call.keywords})
        json.dumps(arguments, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, AssertionError, MemoryError, RecursionError):
        raise NotCalls from None
    return name.strip(), arguments


def _json(value: Any) -> str:
    """Return JSON text; halves of surrogate pairs, which Python's escapes can make, stay escapes."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or text.isprintable() else json.dumps(value)


class _JsonNames(ast.NodeTransformer):
    """Gives JSON's true, false and null their values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


_JSON_NAMES = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr) -> Any:
    """Return the value of a Python literal, which may also contain JSON's true, false and null."""
    return ast.literal_eval(_JsonNames().visit(node))


_HEADER = re.compile(r"\s*call:\s*(?P<name>[^\s{]+)\s*(?=\{)")
_KEY = re.compile(r"\s*([^\s:{}\[\],]+)\s*:")
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
_PRIMITIVE = re.compile(r"[^,}\]]+")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


def gemma_calls(calls: Calls, form: GemmaCalls) -> Wait[None]:
    """Read one call of Gemma: ``call:NAME{key:<|"|>text<|"|>,list:[1,2]}``. It is emitted when it is complete."""
    parts: list[str] = []
    yield from calls.reader.until(calls.closes, parts.append)
    text = "".join(parts)
    header = _HEADER.match(text)
    if header is None:
        raise NotCalls
    try:
        arguments, _ = _gemma_value(text, header.end(), form.quote)
    except (IndexError, ValueError, RecursionError):
        raise NotCalls from None
    calls.begin(header["name"])
    calls.arguments(json.dumps(arguments, ensure_ascii=False))


def _gemma_value(text: str, at: int, quote: str) -> tuple[Any, int]:
    """Return the value at ``at`` and the position after it; it may also be JSON.

    Raises IndexError or ValueError if there is none.
    """
    at = _space(text, at)
    if text.startswith(quote, at):
        end = text.index(quote, at + len(quote))
        return text[at + len(quote) : end], end + len(quote)
    if text[at] in '{["':
        try:
            return _DECODER.raw_decode(text, at)
        except ValueError:
            return _container(text, at, quote)
    match = _PRIMITIVE.match(text, at)
    if match is None:
        raise ValueError(text[at])
    word = match.group().strip()
    return (_WORDS[word] if word in _WORDS else json.loads(word)), match.end()


def _container(text: str, at: int, quote: str) -> tuple[Any, int]:
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
            items[key.group(1)], at = _gemma_value(text, key.end(), quote)
        else:
            value, at = _gemma_value(text, at, quote)
            values.append(value)
        at = _space(text, at)
        if text[at] == ",":
            at = _space(text, at + 1)
        elif text[at] != close:
            raise ValueError(text[at])
    return (items if is_object else values), at + 1


def _space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()
