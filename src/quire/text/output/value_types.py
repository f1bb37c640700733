"""The JSON value that a text stands for, by the schema of a tool's parameter."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

_MAX_REFS = 16


def typed_value(text: str, schema: Any, root: Any = None) -> Any:
    """Return the value of ``text``: of the schema's type if it fits, else as JSON, as Python, or the text itself.

    The text ``null`` is the string of a parameter that allows strings and not null. ``root``: the tool's schema, in
    which references are looked up.
    """
    types = types_of(schema, root)
    if types == {"string"}:
        return text
    try:
        value = json.loads(text)
    except ValueError:
        try:
            value = ast.literal_eval(text.strip())
            json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return text
    if "string" in types and not (_json_types(value) & types):
        return text
    return value


def is_text(schema: Any, root: Any = None) -> bool:
    """Return whether a value of this schema is written without quotes."""
    return types_of(schema, root) == {"string"}


def types_of(schema: Any, root: Any = None) -> set[str]:
    """Return the JSON types that a schema allows; empty if it does not say."""
    allowed: set[str] = set()
    for part in _alternatives(schema, root, _MAX_REFS):
        types = part.get("type")
        here = {types} if isinstance(types, str) else {t for t in types or () if isinstance(t, str)}
        if not here and "const" in part:
            here = _json_types(part["const"])
        if not here and isinstance(part.get("enum"), list):
            here = set().union(*(_json_types(value) for value in part["enum"]))
        if here and part.get("nullable") is True:
            here = here | {"null"}
        allowed |= here
    return allowed


def property_schema(schema: Any, name: str, root: Any = None) -> Any:
    """Return the schema of property ``name`` of an object, None if there is none."""
    for part in _alternatives(schema, root, _MAX_REFS):
        properties, others = part.get("properties"), part.get("additionalProperties")
        if isinstance(properties, Mapping) and name in properties:
            return properties[name]
        if isinstance(others, Mapping):
            return others
    return None


def item_schema(schema: Any, root: Any = None) -> Any:
    """Return the schema of an array's items, None if there is none."""
    return next((p["items"] for p in _alternatives(schema, root, _MAX_REFS) if "items" in p), None)


def _alternatives(schema: Any, root: Any, refs: int) -> Iterator[Mapping[str, Any]]:
    """Return the schema and what it refers to or consists of."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    ref = schema.get("$ref")
    if isinstance(ref, str) and refs:
        yield from _alternatives(_at(root, ref), root, refs - 1)
    for keyword in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(keyword) or () if refs else ():
            yield from _alternatives(part, root, refs - 1)


def _at(root: Any, ref: str) -> Any:
    """Return what a reference ``#/a/b`` means in ``root``, None if there is nothing."""
    here = root if ref.startswith("#") else None
    for step in ref.removeprefix("#").split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        here = here.get(key) if isinstance(here, Mapping) else None
    return here


def _json_types(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"integer", "number"} if value.is_integer() else {"number"}
    if value is None:
        return {"null"}
    return {"string"} if isinstance(value, str) else {"array" if isinstance(value, list) else "object"}
