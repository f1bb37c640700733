"""`Simulation`: a picture with controls; and `Control`, which says what values a control takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from quire.errors import ConfigError, nearest
from quire_lab.learn.picture import Picture

Value = int | float | str


@dataclass(frozen=True, slots=True)
class Control:
    """One input. ``low``, ``high`` and ``step`` are for numbers, ``choices`` for a choice."""

    name: str
    label: str
    kind: Literal["int", "float", "choice", "text"]
    default: Value
    low: float | None = None
    high: float | None = None
    step: float | None = None
    unit: str = ""
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """Return the name as a flag of `quire learn`."""
        return "--" + self.name.replace("_", "-")

    def read(self, value: Any) -> Value:
        """Return ``value`` (also as text) in the type of the control.

        Raises:
            ConfigError: it is out of range or no such choice.
        """
        if self.kind == "text":
            return str(value)
        if self.kind == "choice":
            if str(value) not in self.choices:
                near = nearest(str(value), self.choices)
                raise ConfigError(f"{self.flag} {value!r} must be one of {', '.join(self.choices)}{near}")
            return str(value)
        try:
            number = int(str(value)) if self.kind == "int" else float(value)
        except ValueError:
            number = float("nan")
        if not (self.low is None or number >= self.low) or not (self.high is None or number <= self.high):
            raise ConfigError(f"{self.flag} {value} must be {_kind(self.kind)} in {self.low:g}…{self.high:g}")
        return number


def _kind(kind: str) -> str:
    return "a whole number" if kind == "int" else "a number"


def number(
    name: str, label: str, default: float, low: float, high: float, step: float | None = None, unit: str = ""
) -> Control:
    """Return a control for a number: whole where ``default`` is an int."""
    kind: Literal["int", "float"] = "int" if isinstance(default, int) else "float"
    return Control(name, label, kind, default, low, high, step or (1 if kind == "int" else None), unit)


def choice(name: str, label: str, default: str, choices: tuple[str, ...]) -> Control:
    """Return a control with the values ``choices``."""
    return Control(name, label, "choice", default, choices=choices)


def text(name: str, label: str, default: str, unit: str = "") -> Control:
    """Return a control for a text, such as a list of lengths."""
    return Control(name, label, "text", default, unit=unit)


def numbers_of(flag: str, value: str, low: int, high: int, most: int = 32) -> list[int]:
    """Return the whole numbers of a text such as ``20,28,14``.

    Raises:
        ConfigError: a part is no whole number in ``low … high``, or there are none or too many.
    """
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if not 1 <= len(parts) <= most or not all(p.isdigit() and low <= int(p) <= high for p in parts):
        raise ConfigError(
            f"{flag} {value!r} must be 1…{most} whole numbers in {low}…{high}, with commas between"
        )
    return [int(part) for part in parts]


@dataclass(frozen=True, slots=True)
class Simulation:
    """``draw`` computes the picture from one value per control; the same values give the same picture."""

    name: str
    title: str
    sentence: str
    controls: tuple[Control, ...]
    draw: Callable[..., Picture]

    def run(self, **values: Any) -> Picture:
        """Return the picture for these values; controls that are not given have their defaults.

        Raises:
            ConfigError: a value is not allowed, or no control has such a name.
        """
        known = {control.name: control for control in self.controls}
        for name in values:
            if name not in known:
                raise ConfigError(
                    f"{self.name} has no control {name!r}{nearest(name, known)}; there are {', '.join(known)}"
                )
        return self.draw(**{name: c.read(values.get(name, c.default)) for name, c in known.items()})
