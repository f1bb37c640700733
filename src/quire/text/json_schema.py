"""Rewrites JSON schemas in the keywords that the grammar compiler supports: relaxed, or written out.

Relaxed, a schema loses the keywords that the compiler does not know, and `quire.text.json_watch` checks them while the
text is written. Where that is not possible, it is written out:

The compiler has no `not`, conditions or dependencies, and supports `oneOf` only if it sees that the options exclude
each other. These are rewritten here as alternatives (`anyOf`) by the rules of logic. If the opposite of a keyword
cannot be written (`quire.text.schema_negation`), a narrower schema is used: every text of the grammar is valid under
the schema, but some valid texts may not be in the grammar. A keyword that cannot be rewritten at all stays, and the
compiler rejects it by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from quire.text.schema_negation import SILENT, NoForm, all_of, negate, resolved, without

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
_MAX_OPTIONS = 16  # options of a oneOf that is rewritten
# What a relaxed grammar leaves to `quire.text.json_watch`.
_WATCHED = frozenset(
    {"not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas", "contains", "minContains",
     "maxContains", "uniqueItems", "propertyNames", "minProperties", "maxProperties", "required"}
)  # fmt: skip
_MAX_FREE_PROPERTIES = 160  # properties of an object that may come in any order
MAX_DEPTH = 64  # schemas in schemas
_CHARS = r"A-Za-z0-9._~!$&'()*+,;=@/?-"
# Formats that the compiler does not know, as patterns; some are narrower than the format.
_FORMAT_PATTERNS = {
    "uri-reference": rf"^(?:[{_CHARS}][:{_CHARS}]*)?(?:#[:{_CHARS}]*)?$",
    "iri-reference": rf"^(?:[{_CHARS}][:{_CHARS}]*)?(?:#[:{_CHARS}]*)?$",
    "iri": rf"^[A-Za-z][A-Za-z0-9+.-]*:[:{_CHARS}]+(?:#[:{_CHARS}]*)?$",
    "uri-template": rf"^(?:[:{_CHARS}]|\{{[+#./;?&]?[A-Za-z0-9_]+(?:[*])?(?:,[A-Za-z0-9_]+[*]?)*\}})*$",
    "json-pointer": r"^(?:/(?:[^~/]|~[01])*)*$",
    "relative-json-pointer": r"^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$",
    "regex": r"^(?:(?:[^\\()\[\]{}*+?|^$]|\\[dDwWsSbB.\\/()\[\]{}*+?|^$-]|"
    r"\[\^?(?:[A-Za-z0-9_./ ]|A-Z|a-z|0-9|\\[dws.-])+\])"
    r"(?:[*+?]|\{[0-9]\})?|[\^$|])*$",
    "idn-email": r"^[A-Za-z0-9._+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*$",
    "idn-hostname": r"^[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*$",
}


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


def written_out(schema: Any, root: dict[str, Any]) -> Any:
    """Return a schema for the same texts, or fewer, in the compiler's keywords. ``root``: where ``$ref`` starts."""
    if not isinstance(schema, dict):
        return schema
    # Schemas that get negated are rewritten after that.
    late = {key: schema[key] for key in ("not", "if", "then", "else") if key in schema}
    rest = {key: value for key, value in schema.items() if key not in late}
    made: dict[str, Any] = {**map_subschemas(rest, lambda inner: written_out(inner, root)), **late}
    made = with_known_format(made)
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


def with_known_format(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without a format that constrains nothing, and with patterns for those that are not known."""
    name = schema.get("format")
    if not isinstance(name, str):
        return schema
    rest = {key: value for key, value in schema.items() if key != "format"}
    if name in _FORMAT_PATTERNS:
        pattern = {"pattern": _FORMAT_PATTERNS[name]}
        return {**rest, **pattern} if "pattern" not in rest else all_of([rest, pattern])
    return rest if name not in _FORMATS else schema


def relaxed(schema: Any, *, alternatives: bool, nested: int = 0) -> Any:
    """Return a schema that allows more texts, in the compiler's keywords: the rest is watched while it is written.

    Properties may come in any order. Without ``alternatives``, those of objects whose other keywords say what is in
    them are left to the watch as well, for schemas that would become too large. Raises `NoForm`.
    """
    if not isinstance(schema, dict):
        return schema
    if nested > MAX_DEPTH:
        raise NoForm
    if isinstance(schema.get("$ref"), str):
        identity = {key: schema[key] for key in ("$schema", "$id", "id", "$ref") if key in schema}
        groups = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema.get(key), dict)}
        schema = {**identity, **groups}
    made = {key: value for key, value in schema.items() if key not in _WATCHED}
    made = with_known_format(made)
    options = [made.pop(key) for key in ("anyOf", "oneOf") if isinstance(made.get(key), list)]
    if alternatives and len(options) == 1 and isinstance(made.get("properties"), dict):
        spread = [_spread(made, option) for option in options[0]]
        if all(option is not None for option in spread):
            return relaxed({"anyOf": spread}, alternatives=True, nested=nested + 1)
    has_more = any(key in made for key in ("properties", "patternProperties", "items", "allOf"))
    if options and (alternatives or not has_more):
        made["anyOf"] = options[0]
        if alternatives and len(options) > 1:
            made["allOf"] = [*made.get("allOf", ()), {"anyOf": options[1]}]
    if not alternatives and has_more:
        made.pop("allOf", None)
    made = map_subschemas(made, lambda inner: relaxed(inner, alternatives=alternatives, nested=nested + 1))
    if "anyOf" in made and any(_allows_all(option) for option in made["anyOf"]):
        del made["anyOf"]
    if "allOf" in made:
        made["allOf"] = [part for part in made["allOf"] if not _allows_all(part)]
    return _in_any_order({key: value for key, value in made.items() if key != "allOf" or value})


def _spread(base: dict[str, Any], option: Any) -> dict[str, Any] | None:
    """Return ``base``, an object with properties, and ``option`` as one schema; None if that is not simple."""
    if not isinstance(option, dict) or not option.keys() <= {"type", "properties", *_WATCHED, *SILENT}:
        return None
    kind = option.get("type", base.get("type"))
    if kind not in ("object", None):
        return {"type": kind} if isinstance(kind, str) else None
    own, closed_ = dict(base["properties"]), base.get("additionalProperties") is False
    for name, inner in option.get("properties", {}).items():
        if name in own:
            own[name] = next((s for s in (own[name], inner) if _says_inside(s)), all_of([own[name], inner]))
        elif not closed_:
            own[name] = inner
    return {**base, "properties": own, **({"type": kind} if kind else {})}


def _says_inside(schema: Any) -> bool:
    """Return whether a schema says what is inside of values; the compiler cannot always join two that do."""
    return isinstance(schema, dict) and any(
        key in schema for key in ("properties", "items", "patternProperties")
    )


def _allows_all(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and schema.keys() <= SILENT)


def _in_any_order(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with its properties as patterns, which the compiler allows in any order."""
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    if not isinstance(properties, dict):
        if isinstance(patterns, dict) and len(patterns) > 1:  # they have to be disjoint
            return {key: value for key, value in schema.items() if key not in _NAMED}
        return schema
    apart = not patterns or (len(patterns) == 1 and _matches_none(next(iter(patterns)), properties))
    if not apart or len(properties) > _MAX_FREE_PROPERTIES:
        return {key: value for key, value in schema.items() if key != "patternProperties"} | (
            {"additionalProperties": True} if patterns else {}
        )
    made = {key: value for key, value in schema.items() if key != "properties"}
    names = {f"^{re.escape(name)}$": s for name, s in properties.items()}
    return {**made, "patternProperties": {**names, **(patterns or {})}}


def _matches_none(pattern: str, names: Iterable[str]) -> bool:
    try:
        return not any(re.search(pattern, name) for name in names)
    except re.error:
        return False


_NAMED = ("patternProperties", "additionalProperties")


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
