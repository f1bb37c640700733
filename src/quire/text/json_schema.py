"""Rewrites JSON schemas in the keywords that the grammar compiler supports.

The compiler has no `not`, conditions or dependencies, and supports `oneOf` only if it sees that the options exclude
each other. These are rewritten here as alternatives (`anyOf`) by the rules of logic. If the opposite of a keyword
cannot be written (`quire.text.schema_negation`), a narrower schema is used: every text of the grammar is valid under
the schema, but some valid texts may not be in the grammar. A keyword that cannot be rewritten at all stays, and the
compiler rejects it by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.text.schema_negation import NoForm, all_of, negate, resolved, without

# Keywords whose value is a schema, a list of schemas, or a map of names to schemas.
_ONE = (
    "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LIST = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAP = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
_DEPENDENCIES = ("dependencies", "dependentRequired", "dependentSchemas")
# The formats that JSON Schema defines. The compiler enforces some and rejects the others. Any other name constrains
# nothing (2020-12, part 2, 7.2.3) and is removed.
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uuid",
     "uri", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer", "relative-json-pointer", "regex"}
)  # fmt: skip
_MAX_OPTIONS = 16  # of a oneOf that is rewritten


def map_subschemas(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return ``schema`` with ``change`` applied to the schemas directly inside it."""
    made = dict(schema)
    for key, value in schema.items():
        if key in _LIST and isinstance(value, list):
            made[key] = [change(item) for item in value]
        elif key in _ONE and isinstance(value, dict):
            made[key] = change(value)
        elif key in _MAP and isinstance(value, dict):
            made[key] = {
                name: change(item) if isinstance(item, dict) else item for name, item in value.items()
            }
    return made


def closed(schema: Any) -> Any:
    """Return ``schema`` with objects closed: those that name properties allow no others unless they say so."""
    if not isinstance(schema, dict):
        return schema
    made = map_subschemas(schema, closed)
    if isinstance(made.get("properties"), dict) and made.get("type", "object") == "object":
        made.setdefault("additionalProperties", False)
    return made


def written_out(schema: Any, root: dict[str, Any]) -> Any:
    """Return a schema for the same texts, or fewer, in the compiler's keywords. ``root``: where ``$ref`` starts."""
    if not isinstance(schema, dict):
        return schema
    # Schemas that get negated are rewritten after that.
    late = {key: schema[key] for key in ("not", "if", "then", "else") if key in schema}
    rest = {key: value for key, value in schema.items() if key not in late}
    made: dict[str, Any] = {**map_subschemas(rest, lambda inner: written_out(inner, root)), **late}
    if isinstance(made.get("format"), str) and made["format"] not in _FORMATS:
        del made["format"]
    if made.get("uniqueItems") is False:
        del made["uniqueItems"]
    for rule in (_contains, _dependencies, _condition, _one_of, _not):
        try:
            result = rule(made, root)
        except NoForm:
            continue
        if not isinstance(result, dict):
            return result
        made = result
    return made


def _contains(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """Some item matches. Narrower: the first item matches."""
    if "contains" not in schema or "maxContains" in schema or schema.get("minContains", 1) != 1:
        return schema
    made = {key: value for key, value in schema.items() if key not in ("contains", "minContains")}
    arrays = schema.get("type") in ("array", ["array"])  # else any value that is not an array is valid
    first = {"type": "array", "prefixItems": [schema["contains"]], "minItems": 1}
    others = {"type": ["null", "boolean", "number", "string", "object"]}
    return all_of([made, first if arrays else {"anyOf": [first, others]}])


def _dependencies(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """The property is missing, or its dependency holds."""
    made, parts = dict(schema), []
    for key in _DEPENDENCIES:
        needs = schema.get(key)
        if isinstance(needs, dict):
            del made[key]
            for name, need in needs.items():
                then = {"required": need} if isinstance(need, list) else need
                there = all_of([{"required": [name]}, then])
                parts.append({"anyOf": [without(name), *([there] if there is not False else [])]})
    return all_of([made, *parts])


def _condition(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """`if`, `then`, `else`: the condition and `then`, or its opposite and `else`."""
    made = {key: value for key, value in schema.items() if key not in ("if", "then", "else")}
    if "if" not in schema:
        return made
    then, other = (written_out(schema.get(key, True), root) for key in ("then", "else"))
    if then in (True, {}) and other in (True, {}):
        return made
    condition = written_out(schema["if"], root)
    options = [all_of([condition, then]), all_of([written_out(negate(schema["if"], root), root), other])]
    return all_of([made, {"anyOf": [option for option in options if option is not False]}])


def _one_of(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """`oneOf`: one option, and none of the others."""
    options = schema.get("oneOf")
    if not isinstance(options, list) or not 0 < len(options) <= _MAX_OPTIONS:
        return schema
    made = {key: value for key, value in schema.items() if key != "oneOf"}
    if _types_apart([resolved(option, root) for option in options]):
        return all_of([made, {"anyOf": options}])
    opposites = [negate(option, root) for option in options]
    exact = [
        all_of([option, *(other for j, other in enumerate(opposites) if j != i)])
        for i, option in enumerate(options)
    ]
    return all_of([made, {"anyOf": [option for option in exact if option is not False]}])


def _types_apart(options: list[Any]) -> bool:
    seen: set[str] = set()
    for option in options:
        kinds = option.get("type") if isinstance(option, dict) else None
        names = {kinds} if isinstance(kinds, str) else set(kinds or ())
        names = {"number" if name == "integer" else name for name in names}
        if not names or names & seen:
            return False
        seen |= names
    return True


def _not(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    if "not" not in schema:
        return schema
    made = {key: value for key, value in schema.items() if key != "not"}
    return all_of([made, written_out(negate(schema["not"], root), root)])
