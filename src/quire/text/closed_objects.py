"""Closes the objects of a JSON schema: those that name properties have no others, unless the schema says so.

Every API and `LLM` use this one function. The result is narrower than JSON Schema, never wider: each value
that is valid under it is valid under the schema as written. An object stays open if

- it has ``additionalProperties``, ``patternProperties``, or a ``minProperties`` above the number of its names;
- several parts that hold at once name properties (``allOf``, options beside ``properties``, a ``$ref`` with siblings,
  ``then``): each would exclude the names of the others;
- a closed form would make the schema wider: inside of ``not``, ``if`` and ``contains``, and in options of a ``oneOf``
  that can hold together.

A name that is required counts as a name of the object, with any value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any

from quire.text.schema_negation import NoForm, target

Schema = dict[str, Any]
_NEGATED = ("not", "if", "contains")
_VALUES = ("additionalItems", "additionalProperties", "items", "unevaluatedItems", "unevaluatedProperties")
_MAPS = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")


def closed(schema: Any) -> Any:
    """Return a copy of ``schema`` with its objects closed; the same schema if a reference cannot be followed."""
    if not isinstance(schema, dict):
        return schema
    made: Schema = deepcopy(schema)
    closing = _Closing(made)
    try:
        closing.find_open()
    except NoForm:
        return schema
    closing.close(made, set())
    return made


class _Closing:
    """Works in place on ``root``. Schemas are known by their identity, so a target of several references is one."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._open: set[int] = set()
        self._closed: set[tuple[int, frozenset[str]]] = set()
        self._speaks: dict[int, bool] = {}

    def find_open(self) -> None:
        """Find the objects that stay open. Raises `NoForm` for a reference that cannot be followed."""
        seen: set[int] = set()
        left: list[Schema] = [self._root]
        while left:
            schema = left.pop()
            if id(schema) in seen:
                continue
            seen.add(id(schema))
            left += self._inside(schema)
            for key in _NEGATED:
                self._open_below(_schemas([schema.get(key)]))
            self._open_together(schema)
            left += _schemas([schema.get(key) for key in _NEGATED])

    def _open_together(self, schema: Schema) -> None:
        """Open what several parts of ``schema`` say about one object, here or further inside."""
        parts = list(self._parts(schema))
        if not parts:
            return
        options = _schemas(schema.get("oneOf") or ())
        if len(options) > 1 and not self._are_apart(options):
            self._open_below(options)
        together = [[schema], *parts]
        if sum(any(self._speaking(part, own=i == 0) for part in some) for i, some in enumerate(together)) > 1:
            self._open_group(schema)
        places: dict[str, tuple[int, list[Schema]]] = {}
        for i, some in enumerate(together):
            for part in some:
                for place, inner in self._places(part, own=i == 0, seen=set()):
                    first, inners = places.setdefault(place, (i, []))
                    inners.append(inner)
                    if first != i or not place.startswith("."):
                        places[place] = (-1, inners)
        for first, inners in places.values():
            if first == -1:
                self._open_below(inners)

    def _parts(self, schema: Schema) -> Iterator[list[Schema]]:
        """Yield what holds beside the schema's own keywords: in each list one or several, of which one may hold."""
        if "$ref" in schema:
            yield _schemas([target(schema["$ref"], self._root)])
        for part in _schemas(schema.get("allOf") or ()):
            yield [part]
        for options in (schema.get("anyOf"), schema.get("oneOf"), [schema.get("then"), schema.get("else")]):
            schemas = _schemas(options or ())
            if schemas:
                yield schemas
        for key in ("dependencies", "dependentSchemas"):
            schemas = _schemas(_values(schema.get(key)))
            if schemas:
                yield schemas

    def _inside(self, schema: Schema) -> list[Schema]:
        """Return the schemas directly inside, and what is referred to."""
        children = [schema.get(key) for key in (*_VALUES, "then", "else")]
        for key in _LISTS:
            children += schema[key] if isinstance(schema.get(key), list) else ()
        for key in _MAPS:
            children += _values(schema.get(key))
        return _schemas([*children, *([target(schema["$ref"], self._root)] if "$ref" in schema else [])])

    def _speaking(self, schema: Schema, *, own: bool = False) -> bool:
        """Return whether the schema, or with ``own`` its own keywords, says which properties an object has."""
        if "properties" in schema or "patternProperties" in schema:
            return True
        if schema.get("additionalProperties", False) is not False or own:
            return schema.get("additionalProperties", False) is not False
        known = self._speaks.get(id(schema))
        if known is None:
            self._speaks[id(schema)] = False  # while a reference leads back to it
            known = any(self._speaking(part) for some in self._parts(schema) for part in some)
            self._speaks[id(schema)] = known
        return known

    def _places(self, schema: Schema, *, own: bool, seen: set[int]) -> Iterator[tuple[str, Schema]]:
        """Yield the schemas of properties and items, each with its place; one that begins with "." has a name."""
        if id(schema) in seen:
            return
        seen.add(id(schema))
        named = schema.get("properties")
        for name, inner in named.items() if isinstance(named, dict) else ():
            yield from (("." + name, one) for one in _schemas([inner]))
        rest = [schema.get(key) for key in _VALUES] + _values(schema.get("patternProperties"))
        for key in ("items", "prefixItems"):
            rest += schema[key] if isinstance(schema.get(key), list) else ()
        yield from (("", one) for one in _schemas(rest))
        for some in () if own else self._parts(schema):
            for part in some:
                yield from self._places(part, own=False, seen=seen)

    def _open_group(self, schema: Schema) -> None:
        """Open the schema and its parts, but not what is inside of properties."""
        left, seen = [schema], set()
        while left:
            part = left.pop()
            if id(part) not in seen:
                seen.add(id(part))
                left += [inner for some in self._parts(part) for inner in some]
        self._open |= seen

    def _open_below(self, schemas: list[Schema]) -> None:
        left, seen = list(schemas), set()
        while left:
            schema = left.pop()
            if id(schema) not in seen:
                seen.add(id(schema))
                left += [*self._inside(schema), *_schemas([schema.get(key) for key in _NEGATED])]
        self._open |= seen

    def _are_apart(self, options: list[Schema]) -> bool:
        """Return whether a value of one option, closed, is never valid under another as it is written."""
        followed = [self._followed(option) for option in options]
        return all(_excludes(a, b) for i, a in enumerate(followed) for j, b in enumerate(followed) if i != j)

    def _followed(self, schema: Schema, limit: int = 8) -> Schema:
        inner = target(schema["$ref"], self._root) if "$ref" in schema else None
        return self._followed(inner, limit - 1) if isinstance(inner, dict) and limit else schema

    def close(self, schema: Schema, needed: set[str]) -> None:
        """Close the objects in ``schema``. ``needed``: names that what holds beside it requires."""
        left = [(schema, needed)]
        while left:
            here, names = left.pop()
            if (id(here), frozenset(names)) in self._closed:
                continue
            self._closed.add((id(here), frozenset(names)))
            parts = [part for some in self._parts(here) for part in some]
            names = names | _required(here)
            for part in parts:
                if not self._speaking(part):
                    names |= self._required_in(part, set())
            if id(here) not in self._open:
                _close_one(here, names)
            left += [(part, names) for part in parts]
            beside = {id(part) for part in parts}
            left += [(inner, set()) for inner in self._inside(here) if id(inner) not in beside]

    def _required_in(self, schema: Schema, seen: set[int]) -> set[str]:
        if id(schema) in seen:
            return set()
        seen.add(id(schema))
        parts = [part for some in self._parts(schema) for part in some]
        return _required(schema).union(*(self._required_in(part, seen) for part in parts))


def _close_one(schema: Schema, names: Iterable[str]) -> None:
    properties = schema.get("properties")
    if not isinstance(properties, dict) or "patternProperties" in schema:
        return
    kinds = schema.get("type", "object")
    if "object" not in ([kinds] if isinstance(kinds, str) else kinds):
        return
    if "additionalProperties" in schema:
        return
    missing = sorted(set(names) - properties.keys())
    least = schema.get("minProperties", 0)
    if isinstance(least, int | float) and least > len(properties) + len(missing):
        return
    schema["properties"] = {**properties, **{name: {} for name in missing}}
    schema["additionalProperties"] = False


def _excludes(option: Schema, other: Schema) -> bool:
    """Return whether no value of ``option``, closed, is valid under ``other``."""
    kinds, others = _kinds(option), _kinds(other)
    if kinds and others and not kinds & others:
        return True
    named: Any = option.get("properties")
    described: Any = other.get("properties")
    if not isinstance(named, dict) or kinds != {"object"}:
        return False
    is_open = option.get("additionalProperties", False) is not False or "patternProperties" in option
    if not is_open and not _required(other) <= named.keys() | _required(option):
        return True
    described = described if isinstance(described, dict) else {}
    for name in _required(option) & named.keys() & described.keys():
        values, excluded = _listed(named[name]), _listed(described[name])
        if values is not None and excluded is not None and not values & excluded:
            return True
    return False


def _kinds(schema: Schema) -> set[str]:
    kinds = schema.get("type")
    names = {kinds} if isinstance(kinds, str) else set(kinds or ())
    return {"number" if kind == "integer" else kind for kind in names}


def _listed(schema: Any) -> set[str] | None:
    """Return the texts that a schema lists; None if it lists other values or none."""
    values = [schema["const"]] if isinstance(schema, dict) and "const" in schema else None
    if values is None and isinstance(schema, dict):
        values = schema.get("enum")
    return set(values) if values and all(isinstance(value, str) for value in values) else None


def _required(schema: Schema) -> set[str]:
    names = schema.get("required")
    required = set(map(str, names)) if isinstance(names, list) else set()
    for key in ("dependencies", "dependentRequired"):
        needs = schema.get(key)
        for name, need in needs.items() if isinstance(needs, dict) else ():
            required |= {name, *map(str, need)} if isinstance(need, list) else {name}
    return required


def _schemas(values: Iterable[Any]) -> list[Schema]:
    return [value for value in values if isinstance(value, dict)]


def _values(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else []
