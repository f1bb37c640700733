"""What becomes of each name in a request: used, another name, without effect, refused, or unknown (``fields.toml``)."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any

from pydantic import BaseModel

from quire.errors import RequestError, clip, nearest
from quire.http.limits import NAME_CHARS

# Unknown names of a request that are compared with those of used fields.
MAX_JUDGED = 100


class Use(StrEnum):
    """What Quire does with a field."""

    USED = "used"
    MAPPED = "another name"
    NO_EFFECT = "no effect here"  # accepted: it cannot change this server's answer
    REFUSED = "refused"  # would change the answer and is not supported


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of one field. ``neutral`` values of a refused field are accepted, since they ask for nothing."""

    use: Use
    neutral: tuple[Any, ...] = ()
    hint: str = ""  # advice
    used_as: str = ""  # a mapped field's used name


Table = Mapping[str, Rule]


@cache
def field_table(model: type[BaseModel]) -> Table:
    """Return the rule of each name: the model's fields are used, the others are in its and its bases' sections."""
    names = [field.alias or name for name, field in model.model_fields.items()]
    return rules_of([base.__name__ for base in reversed(model.__mro__)], names)


def rules_of(names: Sequence[str], used: Iterable[str]) -> dict[str, Rule]:
    """Return the rules in sections of ``fields.toml``, where later sections win, and those of ``used`` fields."""
    rules: dict[str, Rule] = {}
    for name in names:
        section = sections().get(name, {})
        rules |= {field: Rule(Use.NO_EFFECT) for field in section.get("no_effect", ())}
        for field_name, refused in section.get("refused", {}).items():
            neutral = tuple(refused.get("neutral", ()))
            rules[field_name] = Rule(Use.REFUSED, neutral, refused.get("hint", ""))
    own = {field: Rule(Use.USED) for field in used}
    for name in names:
        for field_name, ours in sections().get(name, {}).get("mapped", {}).items():
            target = next((target for target in ours if target in own), "")
            rules[field_name] = Rule(Use.MAPPED, used_as=target) if target else Rule(Use.REFUSED)
    return rules | own


@cache
def sections() -> Mapping[str, Any]:
    """Return the contents of ``fields.toml``."""
    return tomllib.loads((files("quire.http") / "fields.toml").read_text())


def unknown_field(name: str, table: Table, prefix: str) -> RequestError:
    return RequestError(
        f"Unknown field {clip(prefix + name)}{nearest(name, table)}. Correct or remove it, or start the server with "
        "--lenient to have unknown fields ignored.",
        param=(prefix + name)[:NAME_CHARS],
        code="unknown_parameter",
    )


def is_neutral(rule: Rule, value: Any) -> bool:
    # 1 == True in Python but not in JSON.
    return any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in rule.neutral)


def refused_field(name: str, value: Any, rule: Rule) -> RequestError:
    allowed = " or ".join(["null", *(clip(n) for n in rule.neutral)])
    hint = f" {rule.hint}" if rule.hint else ""
    return RequestError(
        f"{name} = {clip(value)} is not supported here and would change the answer; only {allowed} is accepted.{hint}",
        param=name,
        code="unsupported_parameter",
    )


MIN_CHARS = 5  # shorter unknown names are not compared


MAX_EDITS = 2


def misspelled(name: str, used: Iterable[str]) -> str | None:
    """Return the used name that ``name`` is one or two edits away from, the nearest one; else None."""
    if not MIN_CHARS <= len(name) <= 64:
        return None
    letters = set(name)
    near = [
        (edits(name, other), other)
        for other in used
        # An edit changes the length by one at most, and the set of letters by two.
        if abs(len(name) - len(other)) <= MAX_EDITS
        and len(letters.symmetric_difference(other)) <= 2 * MAX_EDITS
    ]
    num_edits, other = min(near, default=(MAX_EDITS + 1, ""))
    return other if num_edits <= MAX_EDITS else None


def edits(a: str, b: str) -> int:
    """Return the number of insertions, deletions, replacements and swaps of neighbours that make ``b`` of ``a``.

    This is the optimal string alignment distance (Damerau 1964).
    """
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, char in enumerate(a):
        row = [i + 1]
        for j, other in enumerate(b):
            row.append(min(last[j + 1] + 1, row[j] + 1, last[j] + (char != other)))
            if i and j and char == b[j - 1] and a[i - 1] == other:
                row[-1] = min(row[-1], before[j - 1] + 1)
        before, last = last, row
    return last[-1]
