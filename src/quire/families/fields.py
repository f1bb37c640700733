"""`Fields`: typed reading of a ``config.json``, where every error names the key, its value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quire.errors import ModelLoadError, UnsupportedModelError, clip

LARGEST = 2**31 - 1  # of any integer: token ids have 32 bits
MOST_LAYERS = 4096


class Fields:
    """One JSON object of a model's configuration. A key that is null counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return an integer ≥ ``minimum``, at most `LARGEST`; without a ``default`` the key is required."""
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # some converters write 32.0
        most = MOST_LAYERS if key in ("num_hidden_layers", "block_count") else LARGEST
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= most:
            raise self.wrong(key, f"an integer in {minimum}…{most}")
        return value

    def optional_integer(self, key: str, *, minimum: int = 0) -> int | None:
        return self.integer(key, minimum=minimum) if self.has(key) else None

    def number(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        """Return a finite number (> 0 unless ``positive`` is False)."""
        value = self._get(key, default)
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or (positive and value <= 0):
            raise self.wrong(key, "a finite number > 0" if positive else "a finite number")
        return float(value)

    def optional_number(self, key: str, *, positive: bool = True) -> float | None:
        return self.number(key, positive=positive) if self.has(key) else None

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return a list of exactly ``count`` finite numbers."""
        value = self._get(key, None)
        if not isinstance(value, list | tuple) or len(value) != count:
            raise self.wrong(key, f"a list of {count} numbers")
        for item in value:
            if not isinstance(item, int | float) or isinstance(item, bool) or not math.isfinite(item):
                raise self.wrong(key, f"a list of {count} numbers")
        return tuple(float(item) for item in value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "a string")
        return value

    def items(self, key: str) -> list[Any]:
        """Return a list, empty when the key is absent."""
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            raise self.wrong(key, "a list")
        return list(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """Return the integers ≥ 0 of a key that holds one of them or a list; empty when absent."""
        value = self.values.get(key)
        found = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
        for item in found:
            if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= LARGEST:
                raise self.wrong(key, "an integer ≥ 0 or a list of them")
        return tuple(found)

    def nested(self, key: str) -> Fields | None:
        """Return the nested object, or None when the key is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return Fields(value, f"{self.where}, {key}")

    def refuse(self, key: str, *, unless: tuple[object, ...], why: str) -> None:
        """Raise `UnsupportedModelError` when the key is present with a value other than those of ``unless``."""
        value = self.values.get(key)
        if value is not None and value not in unless:
            allowed = " or ".join(repr(item) for item in unless) or "absent"
            raise UnsupportedModelError(
                f"{self.where}: {key} = {value!r} is not supported ({why}); it must be {allowed}."
            )

    def wrong(self, key: str, allowed: str) -> ModelLoadError:
        value = self.values.get(key)
        said = f"{key} is missing" if value is None else f"{key} = {clip(value)} makes no sense"
        return ModelLoadError(
            f"{self.where}: {said}; it must be {allowed}. Correct the file or download the model again."
        )

    def _get(self, key: str, default: object) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.wrong(key, "present")
            return default
        return value
