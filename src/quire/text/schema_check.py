"""Whether a JSON value is valid under a schema, for the keywords that a grammar cannot hold (`quire.text.json_watch`).

Patterns and formats are matched by ``matches``, in time linear in the text: no pattern can stall the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from quire.text.json_schema import MAX_DEPTH, with_known_format
from quire.text.schema_negation import NoForm, target

# From "pattern" or "format", its value and a text: whether the text has it.
Matches = Callable[[str, str, str], bool]
# Keywords whose meaning needs more than the value and the schema.
_UNKNOWN = (
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
    "extends",
    "disallow",
)
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependencies", "dependentSchemas")
_OLD_DRAFTS = ("draft-03", "draft-04", "draft-05", "draft-06", "draft-07")
_MAX_NESTED = 6  # alternatives within alternatives
_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: _is_number(v) and (isinstance(v, int) or v.is_integer()),
    "number": lambda v: _is_number(v),
    "string": lambda v: isinstance(v, str),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}


def canonical(value: Any) -> str:
    """Return a text that is equal for values that are equal in JSON."""

    def plain(part: Any) -> Any:
        if isinstance(part, float) and part.is_integer():
            return int(part)
        if isinstance(part, list):
            return [plain(item) for item in part]
        return {key: plain(item) for key, item in part.items()} if isinstance(part, dict) else part

    return json.dumps(plain(value), sort_keys=True)


class SchemaCheck:
    """Checks values against ``root`` and its parts."""

    def __init__(self, root: Mapping[str, Any], matches: Matches) -> None:
        """Raises `NoForm` for a schema with keywords that are not known here."""
        self.root: dict[str, Any] = dict(root)
        self._matches = matches
        # Before 2019-09 the siblings of a reference mean nothing.
        self._lone_refs = any(draft in str(root.get("$schema", "")) for draft in _OLD_DRAFTS)
        _refuse_unknown(root, self.root)

    def parts(self, schema: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
        """Return the schema, what it refers to and what its `allOf` has: all of them hold."""
        if schema is False:
            yield {"not": {}}
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return
        if "$ref" in schema:
            yield from self.parts(target(schema["$ref"], self.root), depth + 1)
            if self._lone_refs:
                return
        yield schema
        for part in schema.get("allOf") or ():
            yield from self.parts(part, depth + 1)

    def options(self, schema: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
        """Return the parts of the schema and of all its alternatives: what may hold."""
        for part in self.parts(schema, depth):
            yield part
            for option in (*(part.get("anyOf") or ()), *(part.get("oneOf") or ())):
                if depth < _MAX_NESTED:
                    yield from self.options(option, depth + 1)

    def inside(self, schemas: Sequence[Any], key: str | int, *, options: bool = False) -> tuple[Any, ...]:
        """Return the schemas that hold, or with ``options`` may hold, for a property, or for the item at an index."""
        inner: list[Any] = []
        for schema in schemas:
            for part in self.options(schema) if options else self.parts(schema):
                inner += self._of_property(part, key) if isinstance(key, str) else _of_item(part, key)
        return tuple(inner)

    def listed(self, schemas: Sequence[Any]) -> list[Any] | None:
        """Return the values that are valid under all of ``schemas``, None if no `enum` or `const` lists them."""
        try:
            for values in map(self._values, schemas):
                if values is not None:
                    return [v for v in values if all(self.valid(v, schema) for schema in schemas)]
        except (NoForm, ValueError, ArithmeticError, RecursionError):
            return None
        return None

    def _values(self, schema: Any, depth: int = 0) -> list[Any] | None:
        for part in self.parts(schema, depth):
            if "const" in part or "enum" in part:
                return [part["const"]] if "const" in part else list(part["enum"])
            for options in (part.get("anyOf"), part.get("oneOf")):
                lists = (
                    [self._values(o, depth + 1) for o in options]
                    if options and depth < _MAX_NESTED
                    else [None]
                )
                if None not in lists:
                    return [value for values in lists for value in values or ()]
        return None

    def valid(self, value: Any, schema: Any, depth: int = 0) -> bool:
        """Return whether ``value`` is valid. Raises `NoForm` for a reference that cannot be followed."""
        if isinstance(schema, bool):
            return schema
        if depth > MAX_DEPTH:
            raise NoForm
        return all(self._holds(value, part, depth + 1) for part in self.parts(schema))

    def _holds(self, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
        def valid(inner: Any, of: Any = value) -> bool:
            return self.valid(of, inner, depth)

        types = schema.get("type")
        if types is not None:
            names = [types] if isinstance(types, str) else types
            if not any(_TYPES[name](value) for name in names if name in _TYPES):
                return False
        if "enum" in schema and canonical(value) not in map(canonical, schema["enum"]):
            return False
        if "const" in schema and canonical(value) != canonical(schema["const"]):
            return False
        if "not" in schema and valid(schema["not"]):
            return False
        if "anyOf" in schema and not any(map(valid, schema["anyOf"])):
            return False
        if "oneOf" in schema and sum(map(valid, schema["oneOf"])) != 1:
            return False
        if "if" in schema and not valid(schema.get("then" if valid(schema["if"]) else "else", True)):
            return False
        if _is_number(value):
            return _number_holds(value, schema)
        if isinstance(value, str):
            return self._text_holds(value, schema)
        if isinstance(value, list):
            return self._array_holds(value, schema, depth)
        return not isinstance(value, dict) or self._object_holds(value, schema, depth)

    def _text_holds(self, text: str, schema: Mapping[str, Any]) -> bool:
        if not schema.get("minLength", 0) <= len(text) <= schema.get("maxLength", len(text)):
            return False
        rules = with_known_format({key: schema[key] for key in ("pattern", "format") if key in schema})
        return all(
            self._matches(keyword, part[keyword], text)
            for part in (rules, *rules.get("allOf", ()))
            for keyword in ("pattern", "format")
            if keyword in part
        )

    def _array_holds(self, items: list[Any], schema: Mapping[str, Any], depth: int) -> bool:
        if not schema.get("minItems", 0) <= len(items) <= schema.get("maxItems", len(items)):
            return False
        if schema.get("uniqueItems") is True and len(set(map(canonical, items))) < len(items):
            return False
        if "contains" in schema:
            count = sum(self.valid(item, schema["contains"], depth) for item in items)
            if not schema.get("minContains", 1) <= count <= schema.get("maxContains", count):
                return False
        return all(self.valid(item, s, depth) for i, item in enumerate(items) for s in _of_item(schema, i))

    def _object_holds(self, value: dict[str, Any], schema: Mapping[str, Any], depth: int) -> bool:
        if not schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value)):
            return False
        required = schema.get("required")
        if isinstance(required, list) and not value.keys() >= set(required):
            return False
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            for name, need in schema.get(keyword, {}).items():
                needed = [need] if isinstance(need, str) else need
                if name in value and not (
                    value.keys() >= set(needed)
                    if isinstance(needed, list)
                    else self.valid(value, need, depth)
                ):
                    return False
        if "propertyNames" in schema and not all(
            self.valid(name, schema["propertyNames"], depth) for name in value
        ):
            return False
        return all(
            self.valid(item, s, depth)
            for name, item in value.items()
            for s in self._of_property(schema, name)
        )

    def _of_property(self, schema: Mapping[str, Any], name: str) -> list[Any]:
        schemas = [schema["properties"][name]] if name in schema.get("properties", ()) else []
        patterns = schema.get("patternProperties", {})
        schemas += [inner for pattern, inner in patterns.items() if self._matches("pattern", pattern, name)]
        return schemas or ([schema["additionalProperties"]] if "additionalProperties" in schema else [])


def _of_item(schema: Mapping[str, Any], index: int) -> list[Any]:
    first, items = schema.get("prefixItems", ()), schema.get("items")
    others = [items] if items is not None and not isinstance(items, list) else []
    if isinstance(items, list):
        first, others = items, [schema["additionalItems"]] if "additionalItems" in schema else []
    return [first[index]] if index < len(first) else others


def _number_holds(value: float, schema: Mapping[str, Any]) -> bool:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    # In draft 4 these two say of the limits that they are exclusive.
    if low is not None and (value <= low if above is True else value < low):
        return False
    if high is not None and (value >= high if below is True else value > high):
        return False
    if above is not None and _is_number(above) and value <= above:
        return False
    if below is not None and _is_number(below) and value >= below:
        return False
    step = schema.get("multipleOf")
    if not step:
        return True
    quotient = value / step
    return (isinstance(value, int) and isinstance(step, int) and value % step == 0) or quotient == int(
        quotient
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refuse_unknown(schema: Any, root: dict[str, Any]) -> None:
    if isinstance(schema, list):
        for item in schema:
            _refuse_unknown(item, root)
    elif isinstance(schema, Mapping):
        if any(key in schema for key in _UNKNOWN):
            raise NoForm
        if "$ref" in schema:
            target(schema["$ref"], root)
        for key, item in schema.items():
            if key in _MAPS and isinstance(item, Mapping):
                _refuse_unknown(list(item.values()), root)
            elif key not in ("enum", "const", "default", "examples"):
                _refuse_unknown(item, root)
