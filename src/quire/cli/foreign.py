"""Command lines written for vLLM, SGLang and llama.cpp: `translated` gives the same in the flags of `quire serve`.

What each flag becomes stands in ``foreign_flags.toml``. A flag that has our name and meaning is in no table.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from quire.args import ServerArgs, flag_name, settings_of
from quire.errors import ConfigError

SERVERS = {"vllm": "vLLM", "llama-cpp": "llama.cpp", "sglang": "SGLang"}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
_FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_COUNTS = ("--max-model-len", "--max-num-batched-tokens", "--max-num-seqs")  # may be written as 4k


@cache
def foreign_flags() -> dict[str, dict[str, dict[str, Any]]]:
    """Return server → flag → its row of the table."""
    return tomllib.loads((files("quire.cli") / "foreign_flags.toml").read_text())


def translated(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of ``quire serve`` for those given, and a line about each flag that has no effect.

    Raises:
        ConfigError: a flag has no equivalent, or not with this value; it says what to do.
    """
    words = _Arguments(arguments)
    ours: list[str] = []
    notes: list[str] = []
    has_model = not words.begins_with_a_flag()
    for flag, value in words:
        rule = _rule(flag)
        if rule is None:
            ours += [flag] if value is None else [flag, value]
            continue
        if value is None and not rule.get("bare"):
            value = words.take(many=rule.get("many", False) and has_model)
        unused = value is None or value in rule.get("neutral", [value])
        if "effect" in rule and unused:
            notes.append(f"{_with_value(flag, value)} has no effect: {rule['effect']}")
        elif "to" in rule:
            ours += _renamed(flag, value, rule)
            has_model |= rule["to"] == "MODEL"
        else:
            raise ConfigError(f"{_with_value(flag, value)} is not known here: {rule['instead']}")
    return ours, notes


class _Arguments:
    """Iterates over (flag or word, the value behind ``=`` if any)."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._left = list(arguments)

    def __iter__(self) -> Iterator[tuple[str, str | None]]:
        while self._left:
            argument = self._left.pop(0)
            if not argument.startswith("-"):
                yield argument, None
                continue
            flag, equals, value = argument.partition("=")
            if flag.startswith("--"):
                flag = flag.replace("_", "-")
            yield flag, value if equals else None

    def begins_with_a_flag(self) -> bool:
        return not self._left or self._left[0].startswith("-")

    def take(self, *, many: bool = False) -> str | None:
        """Take the value behind a flag, or all up to the next flag, joined by commas; None: there is none.

        All of them only where the model has been named: else the last of them is the model.
        """
        taken: list[str] = []
        while self._left and (many or not taken):
            if self._left[0].startswith("-") and not self._left[0][1:].isdigit():
                break
            taken.append(self._left.pop(0))
        return ",".join(taken) if taken else None


def _rule(flag: str) -> dict[str, Any] | None:
    return next((flags[flag] for flags in foreign_flags().values() if flag in flags), None)


def _renamed(flag: str, value: str | None, rule: dict[str, Any]) -> list[str]:
    to = rule["to"]
    if rule.get("bare"):
        return [to]
    if value is None:
        raise ConfigError(f"{flag} needs a value; here it is {to}")
    if flag == "--speculative-config":
        return _speculation(value)
    values = rule.get("values", {})
    value = values.get(value, value if value in _ours(to) else values.get("*", value))
    if to == "--lora":
        return [word for path in value.split(",") for word in (to, path)]
    return [value] if to == "MODEL" else [to, _plain_number(to, value)]


def _speculation(text: str) -> list[str]:
    """Return our flags for vLLM's JSON."""
    from quire.engine.assemble import speculation_of

    try:
        settings = speculation_of(json.loads(text))
    except ValueError as error:
        raise ConfigError(f"--speculative-config is not JSON: {error}") from None
    return [word for name, value in settings.items() for word in (flag_name(name), str(value))]


def _ours(flag: str) -> tuple[str, ...]:
    """Return the values that our ``flag`` has a choice of."""
    setting = settings_of(ServerArgs).get(flag[2:].replace("-", "_"))
    return () if setting is None else setting.choices


def _plain_number(flag: str, value: str) -> str:
    """Return ``4k`` as 4000 and ``4K`` as 4096, as vLLM reads them; another value as it is."""
    match = _NUMBER.fullmatch(value)
    if flag not in _COUNTS or match is None:
        return value
    return str(round(float(match[1]) * _FACTORS[match[2]]))


def _with_value(flag: str, value: str | None) -> str:
    return flag if value is None else f"{flag} {value}"
