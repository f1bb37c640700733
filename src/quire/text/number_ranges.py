"""Ranges of numbers with fractions, written so that the grammar compiler keeps to them and leaves nothing out.

The compiler (llguidance 1.9) has two faults. An excluded whole number is let in if the other limit is further from 0 by
less than 1 (0, with `exclusiveMinimum` 0 and `maximum` 0.5). And with a limit of several digits behind the point, it
leaves out numbers with fewer digits (0.7 between 0.25 and 0.75).
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from quire.text.json_schema import map_subschemas

# Next to an excluded whole number, numbers that differ from it by less are left out: a double holds 15 digits.
_NEAREST = Decimal("1e-15")
_MAX_DIGITS = 6  # behind the point
Limit = tuple[Decimal, bool]  # value, whether it is excluded


def written_ranges(schema: Any) -> Any:
    """Return ``schema`` with its ranges of numbers written for the compiler."""
    if not isinstance(schema, dict):
        return schema
    made = map_subschemas(schema, written_ranges)
    kinds = made.get("type", "number")
    if "number" not in ([kinds] if isinstance(kinds, str) else kinds) or "multipleOf" in made:
        return made
    low, high = _limit(made, "minimum", 1), _limit(made, "maximum", -1)
    if low is None and high is None:
        return made
    written = _written(low, high)
    shorter = [_written(*some) for some in _with_fewer_digits(low, high)]
    rest = {key: value for key, value in made.items() if key not in _KEYS}
    if not shorter:
        return {**rest, **written}
    options = {"anyOf": [written, *shorter]}
    return (
        {**rest, **options} if "anyOf" not in rest else {**rest, "allOf": [*rest.get("allOf", ()), options]}
    )


_KEYS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def _limit(schema: dict[str, Any], key: str, sign: int) -> Limit | None:
    """Return the stricter of a limit and its exclusive form; in draft 4 that is a flag."""
    exclusive = "exclusive" + key.capitalize()
    values = [(schema[key], schema.get(exclusive) is True)] if key in schema else []
    values += [(schema[exclusive], True)] if exclusive in schema else []
    limits = [
        (Decimal(str(value)), excluded)
        for value, excluded in values
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    ]
    return max(limits, key=lambda limit: (sign * limit[0], limit[1]), default=None)


def _written(low: Limit | None, high: Limit | None) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for limit, other, name, sign in ((low, high, "Minimum", 1), (high, low, "Maximum", -1)):
        if limit is None:
            continue
        value, excluded = limit
        inner = excluded and sign * value >= 0  # the limit that is nearer to 0
        if inner and other is not None and value == int(value) and abs(other[0] - value) < 1:
            value += sign * _NEAREST * max(1, abs(int(value)))
        made[f"exclusive{name}" if excluded else name.lower()] = _plain(value)
    return made


def _plain(value: Decimal) -> int | float:
    return int(value) if value == int(value) else float(value)


def _with_fewer_digits(low: Limit | None, high: Limit | None) -> list[tuple[Limit | None, Limit | None]]:
    """Return the ranges inside whose limits have fewer digits behind the point."""
    digits = max(0 if limit is None else _digits(limit[0]) for limit in (low, high))
    ranges = []
    for places in range(digits if digits <= _MAX_DIGITS else 0):
        inner_low, inner_high = _rounded(low, places, 1), _rounded(high, places, -1)
        if inner_low is None or inner_high is None or inner_low[0] <= inner_high[0]:
            ranges.append((inner_low, inner_high))
    return ranges


def _digits(value: Decimal) -> int:
    exponent = value.normalize().as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _rounded(limit: Limit | None, places: int, sign: int) -> Limit | None:
    """Return the first number inside of the limit that has so many digits behind the point."""
    if limit is None:
        return None
    value, excluded = limit
    unit = Decimal(1).scaleb(-places)
    made = value.quantize(unit, ROUND_CEILING if sign > 0 else ROUND_FLOOR)
    return (made + sign * unit if excluded and made == value else made), False
