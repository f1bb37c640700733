"""What Quire does with each name that a request may carry: used, no effect here, or refused.

``fields.toml`` names those that are not used; this file applies it. A field that would change the answer and is not
supported is refused by name unless it is null or has its neutral value; an unknown name is refused with the nearest
known one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any

from quire.errors import RequestError, nearest


class Use(StrEnum):
    """What becomes of a field."""

    USED = "used"
    NO_EFFECT = "no effect here"  # accepted: it cannot change this server's answer
    REFUSED = "refused"  # would change the answer and is not supported


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of one field. ``neutral`` values of a refused field are accepted, since they ask for nothing."""

    use: Use
    neutral: tuple[Any, ...] = ()
    hint: str = ""  # what to do instead


Table = Mapping[str, Rule]


def rules_of(names: Iterable[str], used: Iterable[str]) -> dict[str, Rule]:
    """Return the rules in sections of ``fields.toml``, of which the last has its way, and those of ``used`` fields."""
    rules: dict[str, Rule] = {}
    for name in names:
        said = sections().get(name, {})
        rules |= {field: Rule(Use.NO_EFFECT) for field in said.get("no_effect", ())}
        for field, refused in said.get("refused", {}).items():
            rules[field] = Rule(Use.REFUSED, tuple(refused.get("neutral", ())), refused.get("hint", ""))
    return rules | {field: Rule(Use.USED) for field in used}


@cache
def sections() -> Mapping[str, Any]:
    """Return the contents of ``fields.toml``."""
    return tomllib.loads((files("quire.api") / "fields.toml").read_text())


def sift(
    body: Mapping[str, Any], table: Table, *, prefix: str = "", ignored: list[str] | None = None
) -> dict[str, Any]:
    """Return the used fields that are not null. ``prefix`` is the path of ``body`` in the request.

    A list ``ignored`` lets unknown names pass and collects their paths.

    Raises:
        RequestError: a field that is refused, or (without ``ignored``) a name in no table.
    """
    kept: dict[str, Any] = {}
    for name, value in body.items():
        rule = table.get(name)
        if rule is None:
            if ignored is None:
                raise _unknown(name, table, prefix)
            ignored.append(prefix + name)
        elif value is None or rule.use is Use.NO_EFFECT:
            continue
        elif rule.use is Use.USED:
            kept[name] = value
        elif not _is_neutral(rule, value):
            raise _refusal(prefix + name, value, rule)
    return kept


def clip(value: Any, limit: int = 80) -> str:
    """``repr`` cut to a length fit for an error message."""
    text = repr(value) if not isinstance(value, str) else repr(value[: limit + 1])
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _unknown(name: str, table: Table, prefix: str) -> RequestError:
    return RequestError(
        f"Unknown field {clip(prefix + name)}{nearest(name, table)}. Remove it, or start the server with "
        "--lenient to have unknown fields ignored.",
        param=prefix + name,
        code="unknown_parameter",
    )


def _is_neutral(rule: Rule, value: Any) -> bool:
    # 1 == True in Python but not in JSON.
    return any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in rule.neutral)


def _refusal(name: str, value: Any, rule: Rule) -> RequestError:
    allowed = " or ".join(["null", *(clip(n) for n in rule.neutral)])
    hint = f" {rule.hint}" if rule.hint else ""
    return RequestError(
        f"{name} = {clip(value)} is not supported here and would change the answer; only {allowed} is accepted.{hint}",
        param=name,
        code="unsupported_parameter",
    )
