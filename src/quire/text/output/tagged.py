"""Calls whose parameters are written one by one, tagged or as nested elements, and become JSON here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.text.output.formats import NestedCalls, TaggedCalls, Tools
from quire.text.output.reader import Emit, Wait
from quire.text.output.sections import Calls, NotCalls
from quire.text.output.value_types import is_text, item_schema, property_schema, typed_value, types_of

_BAD_NAME = set("<>{}\"'")
_CDATA = "<![CDATA["


def tagged_calls(calls: Calls, form: TaggedCalls, tools: Tools) -> Wait[None]:
    """Read parameters one by one, typed by the tool's schema. A string is emitted while it is written."""
    reader, count = calls.reader, 0
    while True:
        yield from reader.space()
        if count and (yield from calls.closed()):
            return
        if form.open:
            if not (yield from calls.opened(form.open, count)):
                return
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
        ends = tuple(tag for tag in (form.key, form.close, *calls.closes) if tag)
        while (yield from reader.starts(ends)) is None:
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
    tags = tuple(tag for tag in (form.key, form.close, *calls.closes) if tag)
    opening = "{"
    left = dict.fromkeys(schema.get("properties") or ())  # names without a value so far
    yield from reader.space()
    is_json = (yield from reader.peek()) == "{"
    if is_json:  # all arguments as one object, which some models write
        yield from reader.json(calls.arguments)
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
            if not is_json:
                calls.arguments("{}" if opening == "{" else "}")
            return tag != form.close
        key: list[str] = []
        if (yield from reader.until((form.key_end,), key.append)) is None:
            return True
        attributes = yield from _attributes(calls, form)
        if attributes is None:
            continue
        name = "".join(key).strip()
        value_schema = _declared(form, attributes, property_schema(schema, name, schema))
        if not is_json:
            calls.arguments(f"{opening}{json.dumps(name, ensure_ascii=False)}: ")
        opening = ", "
        left.pop(name, None)
        if not (yield from _value(calls, form, value_schema, schema, tuple(left))):
            return True


def _attributes(calls: Calls, form: TaggedCalls) -> Wait[str | None]:
    """Pass what stands between a key and its value and return it; None if no value follows."""
    if not form.value:
        return ""
    parts: list[str] = []
    stops = tuple(tag for tag in (form.value, form.key, form.value_end, form.close, *calls.closes) if tag)
    stop = yield from calls.reader.until(stops, parts.append)
    if stop != form.value:
        if stop is not None and stop != form.value_end:
            calls.reader.rewind(stop)
        return None
    return "".join(parts)


def _declared(form: TaggedCalls, attributes: str, schema: Any) -> Any:
    """Return the schema by which a value is read: the model may say in attributes that it is text or JSON."""
    if not form.text or not attributes.strip():
        return schema
    if form.text.strip() in attributes:
        return {"type": "string"}
    return schema if types_of(schema) - {"string"} else None


def _value(calls: Calls, form: TaggedCalls, schema: Any, root: Any, names: tuple[str, ...]) -> Wait[bool]:
    """Read one value up to its end tag, without one line break on each side. ``names``: of parameters to come."""
    reader, end = calls.reader, form.value_end
    if (yield from reader.peek()) == "\n":
        reader.take(1)
    if form.cdata and (yield from reader.starts((_CDATA,))) is not None:
        reader.take(len(_CDATA))
        end = "]]>"
    if is_text(schema, root):
        text = _Quoted(calls)
        calls.arguments('"')
        complete = yield from _until_end(calls, form, end, names, text.add)
        if complete:
            calls.arguments('"')
    else:
        parts: list[str] = []
        complete = yield from _until_end(calls, form, end, names, parts.append)
        text_value = "".join(parts).removesuffix("\n")
        calls.arguments(json.dumps(typed_value(text_value, schema, root), ensure_ascii=False))
    if end != form.value_end and complete:
        complete = (yield from reader.until((form.value_end,), lambda text: None)) is not None
    return complete


def _until_end(calls: Calls, form: TaggedCalls, end: str, names: tuple[str, ...], emit: Emit) -> Wait[bool]:
    """Emit a value up to ``end`` and pass that; False at the end of the text.

    Some models leave the end tag out. The value also ends before the key of a declared parameter that has no value yet,
    and before the end of the call if the section's end, another call or the end of the text is next.
    """
    reader = calls.reader
    if end != form.value_end:  # inside of CDATA every tag is text
        return (yield from reader.until((end,), emit)) is not None
    call_ends = tuple(tag for tag in ((form.close,) if form.close else calls.closes) if tag)
    next_keys = tuple(name + form.key_end for name in names)
    while True:
        tag = yield from reader.until((end, form.key, *call_ends), emit)
        if tag is None or tag == end:
            return tag == end
        reader.rewind(tag)
        reader.mark()
        reader.take(len(tag))
        space = ""
        if tag == form.key:
            ends = (yield from reader.starts(next_keys)) is not None
        else:
            space = yield from reader.space()
            after = (form.open, *(calls.closes if form.close else ()))
            ends = (yield from reader.peek()) == ""
            ends = ends or (yield from reader.starts(tuple(filter(None, after)))) is not None
        if ends:
            reader.back()
            return True
        reader.forget()
        emit(tag + space)


class _Quoted:
    """Emits text as the inside of a JSON string and holds back a final line break."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._pending = ""

    def add(self, text: str) -> None:
        text = self._pending + text
        self._pending = "\n" if text.endswith("\n") else ""
        self._calls.arguments(json.dumps(text.removesuffix("\n"), ensure_ascii=False)[1:-1])


def nested_calls(calls: Calls, form: NestedCalls, tools: Tools) -> Wait[None]:
    """Read calls whose parameters are elements, typed by the tool's schema; a parameter is emitted when complete."""
    reader, count = calls.reader, 0
    while True:
        yield from reader.space()
        if count and (yield from calls.closed()):
            return
        if not (yield from calls.opened(form.open, count)):
            return
        parts: list[str] = []
        if (yield from reader.until((form.name_end, form.prefix), parts.append)) != form.name_end:
            raise NotCalls
        name = "".join(parts).strip()
        calls.begin(name)
        count += 1
        schema = tools.get(name, {})
        opening, end = "{", form.close.removeprefix(form.prefix).strip("<>")
        while (key := (yield from _element_name(calls, form))) not in ("", end):
            if key.startswith("/"):
                continue
            value = yield from _element(calls, form, property_schema(schema, key, schema), schema)
            if value is None:
                return
            calls.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: {value}")
            opening = ", "
        if not key:
            return
        calls.arguments("{}" if opening == "{" else "}")


def _element_name(calls: Calls, form: NestedCalls) -> Wait[str]:
    """Pass ``prefix<NAME>`` and return the name, "" at the end of the text."""
    parts: list[str] = []
    if (yield from calls.reader.until((form.prefix,), lambda text: None)) is None:
        return ""
    yield from calls.reader.space()
    stop = yield from calls.reader.until((">",), parts.append)
    return "" if stop is None else "".join(parts).removeprefix("<").strip()


def _element(calls: Calls, form: NestedCalls, schema: Any, root: Any) -> Wait[str | None]:
    """Read an element after its name, with its end tag. Return its value as JSON text, None if the text ends in it."""
    parts: list[str] = []
    if (yield from calls.reader.until((form.prefix,), parts.append)) is None:
        return None
    calls.reader.rewind(form.prefix)
    inside: list[tuple[str, str]] = []
    while not (name := (yield from _element_name(calls, form))).startswith("/"):
        is_item = name == "item" and property_schema(schema, name, root) is None
        inner = item_schema(schema, root) if is_item else property_schema(schema, name, root)
        element = (yield from _element(calls, form, inner, root)) if name else None
        if element is None:
            return None
        inside.append((name, element))
    types = types_of(schema, root)
    if not inside and not ("".join(parts).strip() == "" and types & {"object", "array"}):
        return json.dumps(typed_value("".join(parts).strip("\n"), schema, root), ensure_ascii=False)
    if "array" in types or (inside and "object" not in types and all(name == "item" for name, _ in inside)):
        return "[" + ", ".join(element for _, element in inside) + "]"
    return (
        "{"
        + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {element}" for name, element in inside)
        + "}"
    )
