"""The opposite of a JSON schema, as a schema without `not`: De Morgan's rules down to single keywords.

A keyword constrains values of one type and allows all others, so its opposite is a schema of that type: the opposite of
``minimum: 3`` is a number below 3. A schema holds if all its keywords hold, so its opposite is that one of the
keywords' opposites holds. An opposite that cannot be written is left out, which makes the result narrower but never
wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any
from urllib.parse import unquote

Negate = Callable[[Any], Any]
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_MAX_DEPTH = 8
_MAX_OPTIONS = 64
_MAX_TEXT_CHARS = 400  # in an enum whose opposite is written as a pattern
# Keywords that constrain nothing.
SILENT = frozenset(
    {"$schema", "$id", "id", "$comment", "$defs", "definitions", "title", "description", "default", "examples",
     "example", "deprecated", "readOnly", "writeOnly", "$anchor"}
)  # fmt: skip


class NoForm(Exception):
    """The schema cannot be written."""


def all_of(parts: Sequence[Any]) -> Any:
    """Return the schema under which all of ``parts`` hold."""
    if any(part is False for part in parts):
        return False
    schemas = [part for part in parts if isinstance(part, dict) and part]
    if len(schemas) < 2:
        return schemas[0] if schemas else {}
    first = schemas[0]
    return {**first, "allOf": [*first.get("allOf", ()), *schemas[1:]]}


def without(name: str) -> dict[str, Any]:
    """Return the schema of objects without the property."""
    return {"type": "object", "properties": {name: False}}


def target(ref: Any, root: Any) -> Any:
    """Return what a local reference ``#/a/b`` means. Raises `NoForm` for one that is not local or leads nowhere."""
    if not isinstance(ref, str) or not ref.startswith("#") or ref[1:2] not in ("", "/"):
        raise NoForm
    node = root
    for part in unquote(ref[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict) and name in node:
            node = node[name]
        else:
            raise NoForm
    return node


def resolved(schema: Any, root: dict[str, Any], limit: int = 8) -> Any:
    """Follow a local ``$ref``; its siblings hold too. Raises `NoForm` for a reference that is not local."""
    if not isinstance(schema, dict) or "$ref" not in schema:
        return schema
    if limit == 0:
        raise NoForm
    referred = target(schema["$ref"], root)
    rest = {key: value for key, value in schema.items() if key != "$ref" and key not in SILENT}
    return all_of([resolved(referred, root, limit - 1), rest])


def negate(schema: Any, root: dict[str, Any], depth: int = 0) -> Any:
    """Return a schema under which only values are valid that are invalid under ``schema``. Raises `NoForm`."""
    if isinstance(schema, bool):
        return {} if not schema else False
    if depth > _MAX_DEPTH or not isinstance(schema, dict):
        raise NoForm
    if "$ref" in schema:
        return negate(resolved(schema, root), root, depth + 1)
    if "if" in schema:
        raise NoForm
    options: list[Any] = []
    lost = False
    for key, value in schema.items():
        rule = _RULES.get(key)
        if rule is None:
            lost = lost or key not in SILENT
            continue
        try:
            options += rule(value, lambda inner: negate(inner, root, depth + 1))
        except NoForm:
            lost = True
    options = [option for option in options if option is not False]
    if {} in options:
        return {}
    if not options and not lost:
        return False
    if not options or len(options) > _MAX_OPTIONS:
        raise NoForm
    return options[0] if len(options) == 1 else {"anyOf": options}


def _type(value: Any, negate: Negate) -> list[Any]:
    kinds = {value} if isinstance(value, str) else set(value)
    if "integer" in kinds:
        kinds.add("number")  # there is no schema for numbers that are not integers
    left = [kind for kind in _TYPES if kind not in kinds]
    return [{"type": left}] if left else []


def _enum(value: Sequence[Any], negate: Negate) -> list[Any]:
    kinds = {_kind(item) for item in value}
    options: list[Any] = [{"type": [kind for kind in _TYPES if kind not in kinds]}]
    flags = [item for item in value if isinstance(item, bool)]
    if len(set(flags)) == 1:
        options.append({"enum": [not flags[0]]})
    numbers = sorted({item for item in value if _kind(item) == "number"})
    if numbers:
        options += _below(numbers[0]) + _above(numbers[-1])
        options += [
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
            for low, high in pairwise(numbers)
        ]
    texts = [item for item in value if isinstance(item, str)]
    if texts and sum(map(len, texts)) <= _MAX_TEXT_CHARS:
        options.append({"type": "string", "pattern": f"^{_other_than(texts)}$"})
    elif texts:
        options.append({"type": "string", "minLength": max(map(len, texts)) + 1})
    return options


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return names.get(type(value), "number")


def _other_than(texts: Sequence[str]) -> str:
    """Return a regex that matches every text except these."""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text[1:])
    chars = "".join(sorted(re.escape(char) for char in by_first))
    options = [f"[^{chars}][\\s\\S]*" if chars else "[\\s\\S]+"]
    options += [re.escape(char) + _other_than(rest) for char, rest in sorted(by_first.items())]
    return f"(?:{'|'.join(options)}){'' if '' in texts else '?'}"


def _below(value: Any) -> list[Any]:
    return [{"type": "number", "exclusiveMaximum": value}]


def _above(value: Any) -> list[Any]:
    return [{"type": "number", "exclusiveMinimum": value}]


def _required(value: Sequence[str], negate: Negate) -> list[Any]:
    return [without(name) for name in value]


def _properties(value: dict[str, Any], negate: Negate) -> list[Any]:
    options, lost = [], False
    for name, inner in value.items():
        try:
            wrong = negate(inner)
        except NoForm:
            lost = True
            continue
        if wrong is not False:
            options.append({"type": "object", "required": [name], "properties": {name: wrong}})
    if lost and not options:
        raise NoForm
    return options


def _items(value: Any, negate: Negate) -> list[Any]:
    """Some item is invalid. Narrower: the first item is invalid."""
    if isinstance(value, list):
        raise NoForm
    wrong = negate(value)
    return [] if wrong is False else [{"type": "array", "prefixItems": [wrong], "minItems": 1}]


def _additional(value: Any, negate: Negate) -> list[Any]:
    """Which names are additional depends on the other keywords, so there is no opposite."""
    if value in (True, {}):
        return []
    raise NoForm


def _none_of(value: Sequence[Any], negate: Negate) -> list[Any]:
    return [all_of([negate(option) for option in value])]


def _not_all(value: Sequence[Any], negate: Negate) -> list[Any]:
    return [negate(part) for part in value]


def _fewer(kind: str, keyword: str) -> Callable[[Any, Negate], list[Any]]:
    def rule(value: Any, negate: Negate) -> list[Any]:
        return [{"type": kind, keyword: int(value) - 1}] if value >= 1 else []

    return rule


def _more(kind: str, keyword: str) -> Callable[[Any, Negate], list[Any]]:
    return lambda value, negate: [{"type": kind, keyword: int(value) + 1}]


_RULES: dict[str, Callable[[Any, Negate], list[Any]]] = {
    "type": _type,
    "enum": _enum,
    "const": lambda value, negate: _enum([value], negate),
    "required": _required,
    "properties": _properties,
    "items": _items,
    "additionalProperties": _additional,
    "additionalItems": _additional,
    "anyOf": _none_of,
    "oneOf": _none_of,  # narrower: two valid options at once would be an opposite too
    "allOf": _not_all,
    "not": lambda value, negate: [value],
    "minimum": lambda value, negate: _below(value),
    "maximum": lambda value, negate: _above(value),
    "exclusiveMinimum": lambda value, negate: [{"type": "number", "maximum": value}],
    "exclusiveMaximum": lambda value, negate: [{"type": "number", "minimum": value}],
    "minLength": _fewer("string", "maxLength"),
    "maxLength": _more("string", "minLength"),
    "minItems": _fewer("array", "maxItems"),
    "maxItems": _more("array", "minItems"),
}
