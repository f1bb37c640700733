"""The exception tree of Quire.

    QuireError                what went wrong, the value, what is allowed, what to do
    ├── RequestError          the client's request is wrong: HTTP 400 (names the field in `param`)
    │   └── NotFoundError     an unknown model, adapter or response: HTTP 404
    ├── CapacityError         refused by a limit: temporarily (queue full, HTTP 503) or permanently (HTTP 400)
    ├── ConfigError           a flag, a TOML key or a combination of them
    ├── ModelLoadError        checkpoint, tokenizer or hub: missing, truncated, gated, mismatched
    │   └── UnsupportedModelError   an architecture or feature that Quire does not run, by name
    ├── EngineDeadError       the engine process is gone and will not come back
    └── StepError             one step failed in the executor; the engine continues

Programming errors are asserts. Every other failure raises one of these.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class QuireError(Exception):
    """Base of all errors that Quire raises on purpose. `str(error)` is one line fit for a person."""


class RequestError(QuireError):
    """The request cannot be served as asked. `param` is the JSON name of the field, `code` OpenAI's code."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class NotFoundError(RequestError):
    """The request names something that does not exist (HTTP 404)."""


class CapacityError(QuireError):
    """A limit refuses the request. `retryable`: True for a full queue (503), False for what can never fit (400)."""

    def __init__(self, message: str, *, retryable: bool, param: str | None = None) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.param = param


class ConfigError(QuireError):
    """A flag, a key of the configuration file, a live setting, or a combination of them, is wrong."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param  # the setting, if a single one is wrong


class ModelLoadError(QuireError):
    """A checkpoint, tokenizer or hub repository cannot be loaded; the message says what to do."""


class UnsupportedModelError(ModelLoadError):
    """The architecture, or a feature of it, is not supported; the message lists those that are."""


class EngineDeadError(QuireError):
    """The engine process has died and its restarts are used up."""


class StepError(QuireError):
    """The executor failed in one step; its sequences fail and the engine continues."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def clip(value: Any, limit: int = 80) -> str:
    """``repr`` cut to a length fit for an error message. Takes no longer for a large value."""
    try:
        text = repr(_cut(value, [limit], limit + 1))
    except ValueError:  # Python writes no int of more than 4,300 digits
        text = "an integer of too many digits"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _cut(value: Any, left: list[int], num_chars: int) -> Any:
    """Return the beginning of ``value``: texts of ``num_chars``, and about ``left[0]`` elements in all."""
    if isinstance(value, str | bytes):
        return value[:num_chars]
    if not isinstance(value, list | dict):
        return value
    pairs: list[Any] = []
    for item in value.items() if isinstance(value, dict) else value:
        if left[0] <= 0:
            pairs.append(("…", "…") if isinstance(value, dict) else "…")
            break
        left[0] -= 1
        pairs.append(
            tuple(_cut(part, left, num_chars) for part in item)
            if isinstance(value, dict)
            else _cut(item, left, num_chars)
        )
    return dict(pairs) if isinstance(value, dict) else pairs
