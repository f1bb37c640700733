"""JSON schemas made ready for the grammar compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Keywords whose value is a schema, a list of schemas, or a map of names to schemas.
_ONE = (
    "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LIST = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAP = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")


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
    """Return ``schema`` in which objects that name properties, and say nothing of others, have no others."""
    if not isinstance(schema, dict):
        return schema
    made = map_subschemas(schema, closed)
    if isinstance(made.get("properties"), dict) and made.get("type", "object") == "object":
        made.setdefault("additionalProperties", False)
    return made


def compilable(schema: dict[str, Any]) -> dict[str, Any]:
    return schema
