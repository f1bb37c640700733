"""Calls whose arguments are not written as JSON and become JSON here: tagged parameters, Python, Gemma's objects."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from quire.text.output.formats import TaggedCalls, Tools
from quire.text.output.reader import Reader, Wait
from quire.text.output.sections import Calls, NotCalls

_BAD_NAME = set("<>{}\"'")


def tagged_calls(calls: Calls, form: TaggedCalls, tools: Tools) -> Wait[None]:
    """Read parameters one by one, typed by the tool's schema. A string is emitted while it is written."""
    reader, count = calls.reader, 0
    while True:
        yield from reader.space()
        if count and (yield from calls.closed()):
            return
        if form.open:
            if (yield from reader.starts((form.open,))) is None:
                if count:
                    return
                raise NotCalls
            if count:
                reader.mark()
            reader.take(len(form.open))
        elif count:
            return
        name = yield from _tagged_name(calls, form)
        calls.begin(name)
        count += 1
        ended = yield from _parameters(calls, form, tools.get(name, {}))
        if ended:
            return


def _tagged_name(calls: Calls, form: TaggedCalls) -> Wait[str]:
    reader = calls.reader
    parts: list[str] = []
    if form.name_end:
        stop = yield from reader.until((form.name_end,), parts.append)
        complete = stop is not None
    else:  # the name ends at the next tag, which is not passed
        while (yield from reader.starts((form.key, *calls.closes))) is None:
            if (yield from reader.peek()) == "":
                break
            parts.append(reader.take(1))
        complete = (yield from reader.peek()) != ""
    name = "".join(parts).strip()
    if not complete or _BAD_NAME & set(name) or "\n" in name:
        raise NotCalls
    return name


def _parameters(calls: Calls, form: TaggedCalls, schema: Mapping[str, Any]) -> Wait[bool]:
    """Read parameters up to the end of the call; return whether the section ended with it."""
    reader = calls.reader
    properties = schema.get("properties") or {}
    tags = tuple(tag for tag in (form.key, form.close, *calls.closes) if tag)
    opening = "{"
    while True:
        yield from reader.space()
        tag = yield from reader.starts(tags)
        if tag is None:
            if (yield from reader.peek()) == "":
                return True
            reader.take(1)  # text between parameters is dropped
            continue
        reader.take(len(tag))
        if tag != form.key:
            calls.arguments("{}" if opening == "{" else "}")
            return tag != form.close
        key: list[str] = []
        if (yield from reader.until((form.key_end,), key.append)) is None:
            return True
        if form.value:
            yield from reader.space()
            if (yield from reader.starts((form.value,))) is not None:
                reader.take(len(form.value))
        name = "".join(key).strip()
        calls.arguments(f"{opening}{json.dumps(name, ensure_ascii=False)}: ")
        opening = ", "
        if not (yield from _value(calls, form, properties.get(name))):
            return True


def _value(calls: Calls, form: TaggedCalls, schema: Any) -> Wait[bool]:
    """Read one value up to its end tag, without one line break on each side."""
    reader = calls.reader
    if (yield from reader.peek()) == "\n":
        reader.take(1)
    if is_text(schema):
        text = _Quoted(calls)
        calls.arguments('"')
        complete = (yield from reader.until((form.value_end,), text.add)) is not None
        if complete:
            calls.arguments('"')
        return complete
    parts: list[str] = []
    complete = (yield from reader.until((form.value_end,), parts.append)) is not None
    text_value = "".join(parts).removesuffix("\n")
    calls.arguments(json.dumps(typed_value(text_value, schema), ensure_ascii=False))
    return complete


class _Quoted:
    """Emits text as the inside of a JSON string and holds back a final line break."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._held = ""

    def add(self, text: str) -> None:
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        self._calls.arguments(json.dumps(text.removesuffix("\n"), ensure_ascii=False)[1:-1])


def typed_value(text: str, schema: Any) -> Any:
    """Return the value of ``text``: of the schema's type if it fits, else as JSON, as Python, or the text itself."""
    if is_text(schema):
        return text
    types = _types(schema)
    try:
        value = json.loads(text)
    except ValueError:
        try:
            value = ast.literal_eval(text.strip())
            json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return text
    if types and "string" in types and not (_json_types(value) & types):
        return text
    return value


def is_text(schema: Any) -> bool:
    """Return whether a value of this schema is written without quotes."""
    return _types(schema) == {"string"}


def _types(schema: Any) -> set[str]:
    """Return the JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    types = schema.get("type")
    found = {types} if isinstance(types, str) else {t for t in types or () if isinstance(t, str)}
    if not found and "enum" in schema:
        found = set().union(*(_json_types(value) for value in schema["enum"]))
    for part in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        found |= _types(part)
    return found


def _json_types(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"}
    if value is None:
        return {"null"}
    return {"string"} if isinstance(value, str) else {"array" if isinstance(value, list) else "object"}


def python_calls(calls: Calls, tools: Tools) -> Wait[None]:
    """Read ``[f(a=1, b="x"), g()]``; a call is emitted when it is complete."""
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
            name, arguments = _call_of((yield from _source(reader)), tools)
            calls.begin(name)
            calls.arguments(json.dumps(arguments, ensure_ascii=False))
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


def _call_of(source: str, tools: Tools) -> tuple[str, dict[str, Any]]:
    name, _, inside = source.partition("(")
    try:
        call = ast.parse("f(" + inside, mode="eval").body
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


class _JsonNames(ast.NodeTransformer):
    """Gives JSON's true, false and null their values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


_JSON_NAMES = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr) -> Any:
    """Return the value of a Python literal, which may also contain JSON's true, false and null."""
    return ast.literal_eval(_JsonNames().visit(node))


_QUOTE = '<|"|>'
_HEADER = re.compile(r"\s*call:\s*(?P<name>[^\s{]+)\s*(?=\{)")
_KEY = re.compile(r"\s*([^\s:{}\[\],]+)\s*:")
_SPACE = re.compile(r"\s*")
_PRIMITIVE = re.compile(r"[^,}\]]+")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


def gemma_calls(calls: Calls) -> Wait[None]:
    """Read one call of Gemma 4: ``call:NAME{key:<|"|>text<|"|>,list:[1,2]}``. It is emitted when it is complete."""
    parts: list[str] = []
    yield from calls.reader.until(calls.closes, parts.append)
    text = "".join(parts)
    header = _HEADER.match(text)
    if header is None:
        raise NotCalls
    try:
        arguments, _ = _gemma_value(text, header.end())
    except (IndexError, ValueError, RecursionError):
        raise NotCalls from None
    calls.begin(header["name"])
    calls.arguments(json.dumps(arguments, ensure_ascii=False))


def _gemma_value(text: str, at: int) -> tuple[Any, int]:
    """Return the value at ``at`` and the position after it. Raises IndexError or ValueError if there is none."""
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
            items[key.group(1)], at = _gemma_value(text, key.end())
        else:
            value, at = _gemma_value(text, at)
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
