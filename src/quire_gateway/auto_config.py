"""``[auto]`` of the gateway's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.args import make_args
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AutoArgs:
    """``[auto]``"""

    name: str = "auto"
    default: str = ""
    judge: str | None = None
    judge_timeout_s: float = 0.5


@dataclass(frozen=True, slots=True)
class RuleArgs:
    """One of ``[[auto.rules]]``: all conditions that are given must hold."""

    model: str = ""
    tenants: tuple[str, ...] = ()
    min_prompt_tokens: int | None = None
    max_prompt_tokens: int | None = None
    max_budget_left: float | None = None
    min_difficulty: float | None = None
    max_difficulty: float | None = None

    @property
    def asks_judge(self) -> bool:
        return self.min_difficulty is not None or self.max_difficulty is not None


@dataclass(frozen=True, slots=True)
class AutoConfig:
    """The table and its rules, in order."""

    args: AutoArgs
    rules: tuple[RuleArgs, ...]


def read_auto(table: Mapping[str, Any], origin: str) -> AutoConfig | None:
    """Return the configuration of ``[auto]``; None without the table.

    Raises:
        ConfigError: names the key that is wrong.
    """
    if not table:
        return None
    rules, own = table.get("rules", []), {key: value for key, value in table.items() if key != "rules"}
    args = make_args(AutoArgs, own, origin=f"{origin}: [auto]")
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise ConfigError(f"{origin}: auto.rules = {rules!r} must be tables ([[auto.rules]])")
    checked = []
    for index, values in enumerate(rules):
        where = f"{origin}: auto.rules[{index}]"
        rule = make_args(RuleArgs, values, origin=where)
        if not rule.model or rule.model == args.name:
            raise ConfigError(f"{where}: model = {rule.model!r} must be the name of another model")
        if rule.asks_judge and args.judge is None:
            raise ConfigError(f"{where}: a difficulty needs [auto] judge = 'module:function'")
        checked.append(rule)
    if not args.default or args.default == args.name:
        raise ConfigError(f"{origin}: [auto]: default = {args.default!r} must be the name of another model")
    return AutoConfig(args, tuple(checked))
