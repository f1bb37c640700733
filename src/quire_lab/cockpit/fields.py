"""`Look`: how a form shows a setting: its label and unit, from ``fields.toml``, and what it makes of the fields."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import msgspec


class Flag(msgspec.Struct, frozen=True):
    """One flag of a command, or its argument (``flag`` is empty)."""

    name: str
    flag: str
    help: str
    panel: str
    kind: str = "text"  # or "bool", "choice"
    choices: tuple[str, ...] = ()
    suggested: tuple[str, ...] = ()
    negative: str = ""  # flag that turns off a bool, if it is on by default


class FieldPart(msgspec.Struct, frozen=True):
    """One of several fields that make a setting."""

    name: str
    label: str
    unit: str


class Look(msgspec.Struct, frozen=True):
    """A setting in a form. ``unit`` is None for what is no quantity, and "" for a quantity without a unit."""

    label: str
    unit: str | None = None
    hint: str = ""
    kind: str = ""  # "text": not only a number, though it has a unit
    options: tuple[str, ...] = ()
    parts: tuple[FieldPart, ...] = ()
    join: str | None = None  # separator; None: NAME=VALUE UNIT per part, with commas

    @property
    def is_number(self) -> bool:
        return self.unit is not None and self.kind != "text"


_TABLE = tomllib.loads((files("quire_lab.cockpit") / "fields.toml").read_text())
LOOKS = msgspec.convert(_TABLE["labels"], dict[str, Look])
FIRST = msgspec.convert(_TABLE["first"], dict[str, tuple[str, ...]])


def value_of(name: str, values: Mapping[str, Any]) -> Any:
    """Return the value of a setting from the fields of a form."""
    look = LOOKS[name]
    if not look.parts:
        return values.get(name)
    texts = {part: str(values.get(f"{name}.{part.name}") or "") for part in look.parts}
    if look.join is not None:
        return look.join.join(texts.values()) if any(texts.values()) else None
    return ",".join(f"{part.name}={text}{part.unit}" for part, text in texts.items() if text)


def command_arguments(flags: Sequence[Flag], values: Mapping[str, Any]) -> list[str]:
    """Return the command's arguments for the fields that are filled in."""
    first, rest = [], []
    for flag in flags:
        value = value_of(flag.name, values)
        if value in (None, "", False) and not (flag.negative and value is False):
            continue
        if flag.name == "gpu" and values.get("cpu"):  # this machine is asked for in its place
            continue
        if flag.kind == "bool":
            rest += [flag.negative] if value is False else [flag.flag] if not flag.negative else []
        elif flag.flag:
            rest += [flag.flag, str(value)]
        else:
            first.append(str(value))
    return first + rest


def in_labels(text: str, flags: Sequence[Flag]) -> str:
    """Return a message of the command with the labels of the form in place of the names of its settings."""
    labels = {flag.flag or flag.name: f"“{LOOKS[flag.name].label}”" for flag in flags}
    labels |= {f"settings: {flag.name}": f"“{LOOKS[flag.name].label}”" for flag in flags}
    return re.sub(r"(settings: |--)[a-z][\w-]*", lambda match: labels.get(match[0], match[0]), text)
