"""``deadline_ms``: until when an answer is worth having."""

from __future__ import annotations

from typing import Any

from quire.errors import RequestError
from quire.http.wire import Number, Wire, clip, parse
from quire.request import Deadline

MAX_MS = 7 * 24 * 3600 * 1000


class DeadlineMs(Wire):
    """``deadline_ms`` as an object; milliseconds from the arrival of the request."""

    first_token: Number | None = None
    total: Number | None = None


def deadline_of(given: Any, ignored: list[str] | None) -> Deadline | None:
    """Return the limits that a number (the total) or an object stands for.

    Raises:
        RequestError: a limit that is none, or a first token that may come later than the end.
    """
    if given is None:
        return None
    if isinstance(given, dict):
        limits = parse(DeadlineMs, given, prefix="deadline_ms.", ignored=ignored)
    else:
        limits = DeadlineMs(total=given)
    for name, value in (("first_token", limits.first_token), ("total", limits.total)):
        if value is not None and not 0 < value <= MAX_MS:
            where = f"deadline_ms.{name}" if isinstance(given, dict) else "deadline_ms"
            raise RequestError(
                f"{where} = {clip(value)} is not allowed: it must be a number of milliseconds in (0, {MAX_MS}].",
                param=where,
            )
    first, total = limits.first_token, limits.total
    if first is None and total is None:
        raise RequestError(
            "deadline_ms is empty: it must have first_token, total or both.", param="deadline_ms"
        )
    if first is not None and total is not None and first > total:
        raise RequestError(
            f"deadline_ms.first_token = {first:g} is more than deadline_ms.total = {total:g}.",
            param="deadline_ms.first_token",
        )
    return Deadline(None if first is None else first / 1e3, None if total is None else total / 1e3)
