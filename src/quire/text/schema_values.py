"""Whether a JSON schema has a finite value, decided before it is compiled.

For each schema inside, the types of its finite values are the least fixpoint of a monotone function of those of the
schemas that it needs: a required property, the first ``minItems`` items, the options of ``anyOf``, what is referred to.
Recursion with a way out has values, recursion without one has none. "No value" is certain; a schema may still have none
for a reason that is not looked at (patterns, ``not``, conditions).

`without_empty` raises if nothing is valid under the whole schema, and puts ``false`` where nothing is valid inside, so
that an answer never begins what cannot end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from quire.errors import RequestError
from quire.text.schema_check import SchemaCheck
from quire.text.schema_negation import NoForm, target

Schema = dict[str, Any]
Kinds = frozenset[str]
# Why a type has no value: keyword and cause, and the schema inside that is to blame.
Reason = tuple[str, Any]
ALL: Kinds = frozenset({"null", "boolean", "number", "string", "array", "object"})
_ONE = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
_MAX_VALUES = 200  # values looked at per enum


def without_empty(schema: Schema) -> Schema:
    """Return ``schema``, changed in place, with ``false`` for each schema inside under which nothing is valid.

    Raises:
        RequestError: nothing is valid under the schema; names the place and the keyword.
    """
    values = _Values(schema)
    values.solve()
    if not values.kinds_of(schema):
        raise RequestError(values.explain(schema))
    values.prune()
    return schema


class _Values:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._paths: dict[int, str] = {}
        self._order: list[Schema] = []  # inner schemas first
        self._kinds: dict[int, Kinds] = {}
        self._why: dict[int, list[Reason]] = {}
        try:
            self._check: SchemaCheck | None = SchemaCheck(root, _unknown)
        except NoForm:
            self._check = None

    def solve(self) -> None:
        """Find the kinds of all schemas: the least fixpoint."""
        self._number(self._root)
        changed = True
        while changed:
            changed = False
            for schema in self._order:
                known = self._kinds.get(id(schema), frozenset())
                if known == ALL:
                    continue
                kinds = self._evaluated(schema)
                changed = changed or kinds != known
                self._kinds[id(schema)] = kinds

    def kinds_of(self, schema: Any) -> Kinds:
        """Return the types of the finite values known so far."""
        if isinstance(schema, dict):
            return self._kinds.get(id(schema), frozenset() if id(schema) in self._paths else ALL)
        return frozenset() if schema is False else ALL

    def explain(self, schema: Any) -> str:
        """Return why nothing is valid under ``schema``."""
        passed: list[int] = []
        while True:
            passed.append(id(schema))
            where = self._paths.get(id(schema), "#")
            reasons = self._why.get(id(schema)) or [("type: no value is left", None)]
            text, inner = next((r for r in reasons if r[1] is None), reasons[0])
            if inner is None or not isinstance(inner, dict):
                return f"nothing is valid under the schema: {where}: {text}"
            if id(inner) in passed:
                return (
                    f"no finite value is valid under the schema: {where}: {text}, which needs "
                    f"{self._paths.get(id(inner), '#')} again, without a way out"
                )
            schema = inner

    def prune(self) -> None:
        """Put ``false`` where nothing is valid; options under which nothing is valid go."""

        def satisfiable(inner: Any) -> Any:
            return False if isinstance(inner, dict) and not self.kinds_of(inner) else inner

        for schema in self._order:
            for key, value in schema.items():
                if key in ("anyOf", "oneOf") and isinstance(value, list):
                    schema[key] = [item for item in map(satisfiable, value) if item is not False] or value
                elif key in _LISTS and isinstance(value, list):
                    schema[key] = [satisfiable(item) for item in value]
                elif key in _ONE:
                    schema[key] = satisfiable(value)
                elif key in _MAPS and isinstance(value, dict):
                    schema[key] = {name: satisfiable(item) for name, item in value.items()}

    def _number(self, root: Schema) -> None:
        """Give each schema a path and a place in the order, with a stack of its own: schemas may be deep."""
        left: list[tuple[Schema, str, bool]] = [(root, "#", False)]
        while left:
            schema, path, done = left.pop()
            if done:
                self._order.append(schema)
            elif id(schema) not in self._paths:
                self._paths[id(schema)] = path
                left.append((schema, path, True))
                left += [(inner, f"{path}/{name}", False) for name, inner in _inside(schema)]
                there = self._target(schema)
                if isinstance(there, dict):
                    left.append((there, str(schema["$ref"]), False))

    def _target(self, schema: Schema) -> Any:
        """Return what the schema refers to; true for what cannot be followed."""
        if "$ref" not in schema:
            return True
        try:
            return target(schema["$ref"], self._root)
        except NoForm:
            return True

    def _members(self, schema: Schema) -> list[Schema] | None:
        """Return the schemas that hold together with ``schema``; None if ``$ref`` leads back to itself."""
        members: list[Schema] = []
        seen: set[int] = set()

        def add(one: Any, above: tuple[int, ...]) -> bool:
            if id(one) in above:
                return False
            if one is False:
                members.append({"not": {}, "type": []})
            if not isinstance(one, dict) or id(one) in seen:
                return True
            seen.add(id(one))
            members.append(one)
            inner = [self._target(one), *_list(one, "allOf")]
            return all(add(part, (*above, id(one))) for part in inner)

        return members if add(schema, ()) else None

    def _evaluated(self, schema: Schema) -> Kinds:
        why: list[Reason] = []
        self._why[id(schema)] = why
        members = self._members(schema)
        if members is None:
            why.append(("$ref leads back to itself", None))
            return frozenset()
        kinds = ALL
        for member in members:
            kinds &= _named_kinds(member)
            for key in ("anyOf", "oneOf"):
                if isinstance(member.get(key), list):
                    options = [self.kinds_of(option) for option in member[key]]
                    if not any(options):
                        first = member[key][0] if member[key] else None
                        why.append((f"{key}: nothing is valid under its options", first))
                    kinds &= frozenset().union(*options)
        if not kinds:
            why.append(("no type is left: its keywords exclude each other", None) if not why else why[-1])
            return kinds
        listed = self._listed(schema, members, kinds)
        if listed is not None:
            if not listed:
                key = next(key for member in members for key in ("const", "enum") if key in member)
                why.append((f"{key}: none of its values is valid under the other keywords", None))
            return listed
        rules = {"number": _number, "string": _lengths, "array": self._array, "object": self._object}
        for kind in sorted(kinds & rules.keys()):
            reason = rules[kind](members)
            if reason is not None:
                kinds -= {kind}
                why.append(reason)
        return kinds

    def _listed(self, schema: Schema, members: Sequence[Schema], kinds: Kinds) -> Kinds | None:
        """Return the kinds of the values that are listed and valid; None if no member lists values."""
        for member in members:
            values = [member["const"]] if "const" in member else member.get("enum")
            if isinstance(values, list):
                if len(values) > _MAX_VALUES:
                    return frozenset(map(_kind, values)) & kinds
                return frozenset(_kind(v) for v in values if _kind(v) in kinds and self._valid(v, schema))
        return None

    def _valid(self, value: Any, schema: Schema) -> bool:
        try:
            return self._check is None or self._check.valid(value, schema)
        except (NoForm, ValueError, ArithmeticError, TypeError, AttributeError, RecursionError):
            return True

    def _array(self, members: Sequence[Schema]) -> Reason | None:
        least, most = _bounds(members, "minItems", "maxItems")
        for member in members:
            if "contains" in member and _count(member, "minContains", 1) > 0:
                least = max(least, 1)
                if not self.kinds_of(member["contains"]):
                    return "contains: nothing is valid under it", member["contains"]
        if least > most:
            return f"minItems = {least:g} is above maxItems = {most:g}", None
        longest = max((len(_first(member)) for member in members), default=0)
        for i in range(int(min(least, longest + 1))):
            inner = [one for member in members for one in _items(member, i)]
            kinds = ALL.intersection(*map(self.kinds_of, inner))
            if not kinds:
                return f"minItems = {least:g}: nothing is valid as item {i}", _blamed(inner, self)
        return None

    def _object(self, members: Sequence[Schema]) -> Reason | None:
        least, most = _bounds(members, "minProperties", "maxProperties")
        required = {name for member in members for name in _list(member, "required") if isinstance(name, str)}
        if len(required) > most:
            return f"maxProperties = {most:g} is below the {len(required)} names of required", None
        if least > most:
            return f"minProperties = {least:g} is above maxProperties = {most:g}", None
        for name in sorted(required):
            inner = [one for member in members for one in _properties(member, name)]
            if not ALL.intersection(*map(self.kinds_of, inner)):
                return f"required: nothing is valid as property {name!r:.80}", _blamed(inner, self)
        for member in members:
            if member.get("additionalProperties") is False and not member.get("patternProperties"):
                named = [one for one in _map(member, "properties").values() if self.kinds_of(one)]
                if least > len(named):
                    return f"minProperties = {least:g} is above the {len(named)} names of properties", None
        return None


def _unknown(keyword: str, value: str, text: str) -> bool:
    """Patterns and formats are not matched here: a value that depends on one may be valid."""
    raise NoForm


def _blamed(inner: Sequence[Any], values: _Values) -> Any:
    return next((one for one in inner if not values.kinds_of(one)), None)


def _number(members: Sequence[Schema]) -> Reason | None:
    lows = [_limit(m, "minimum", "exclusiveMinimum", 1) for m in members]
    highs = [_limit(m, "maximum", "exclusiveMaximum", -1) for m in members]
    low, low_name, above = max((one for some in lows for one in some), default=(-math.inf, "", 0))
    high, high_name, below = min((one for some in highs for one in some), default=(math.inf, "", 0))
    if low > high or (low == high and (above or below)):
        return f"{low_name} = {float(low):g} and {high_name} = {float(high):g} leave no number", None
    if math.isinf(low) or math.isinf(high):
        return None
    steps = [Fraction(str(m["multipleOf"])) for m in members if _is_number(m.get("multipleOf"))]
    if any("integer" in _types(m) and "number" not in _types(m) for m in members):
        steps.append(Fraction(1))
    for step in steps:
        if step <= 0:
            continue
        first, last = math.ceil(Fraction(low) / step), math.floor(Fraction(high) / step)
        first += bool(above) and first * step == low
        last -= bool(below) and last * step == high
        if first > last:
            rule = "type 'integer'" if step == 1 else f"multipleOf = {float(step):g}"
            return (
                f"{low_name} = {float(low):g} and {high_name} = {float(high):g} leave nothing of {rule}",
                None,
            )
    return None


def _limit(schema: Schema, key: str, exclusive: str, sign: int) -> Iterator[tuple[Any, str, int]]:
    """Yield the limits with their names; the third value is ``sign`` for a limit that is excluded itself."""
    value, other = schema.get(key), schema.get(exclusive)
    if _is_number(value):
        yield Fraction(str(value)), key, sign if other is True else 0
    if _is_number(other):
        yield Fraction(str(other)), exclusive, sign


def _lengths(members: Sequence[Schema]) -> Reason | None:
    least, most = _bounds(members, "minLength", "maxLength")
    return (f"minLength = {least:g} is above maxLength = {most:g}", None) if least > most else None


def _bounds(members: Sequence[Schema], least: str, most: str) -> tuple[float, float]:
    return max(_count(m, least, 0) for m in members), min(_count(m, most, math.inf) for m in members)


def _count(schema: Schema, key: str, default: float) -> float:
    value = schema.get(key)
    return float(value) if value is not None and _is_number(value) else default


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _types(schema: Schema) -> list[Any]:
    kinds = schema.get("type", ["number"])
    return [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []


def _named_kinds(schema: Schema) -> Kinds:
    kinds = schema.get("type")
    if not isinstance(kinds, str | list):
        return ALL
    return frozenset({"number" if kind == "integer" else str(kind) for kind in _types(schema)})


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    names: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return names.get(type(value), "number")


def _properties(schema: Schema, name: str) -> list[Any]:
    named = _map(schema, "properties")
    if name in named:
        return [named[name]]
    return [] if _map(schema, "patternProperties") else [schema.get("additionalProperties", True)]


def _first(schema: Schema) -> list[Any]:
    return _list(schema, "prefixItems") or _list(schema, "items")


def _items(schema: Schema, index: int) -> list[Any]:
    first, rest = _first(schema), schema.get("items", True)
    if isinstance(rest, list):
        rest = schema.get("additionalItems", True)
    return [first[index] if index < len(first) else rest]


def _list(schema: Schema, key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _map(schema: Schema, key: str) -> dict[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, dict) else {}


def _inside(schema: Schema) -> Iterator[tuple[str, Schema]]:
    for key in _ONE:
        if isinstance(schema.get(key), dict):
            yield key, schema[key]
    for key in _LISTS:
        yield from (
            (f"{key}/{i}", item) for i, item in enumerate(_list(schema, key)) if isinstance(item, dict)
        )
    for key in _MAPS:
        yield from (
            (f"{key}/{name}", item) for name, item in _map(schema, key).items() if isinstance(item, dict)
        )
