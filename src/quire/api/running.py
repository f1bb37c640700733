"""The HTTP requests that are at work now, by the ids under which an operator may know them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Cancellable(Protocol):
    """A request at work."""

    async def cancel(self) -> None:
        """End it now: its client gets an error that says who ended it."""

    def describe(self, now_s: float) -> dict[str, Any]:
        """What an operator sees of it."""


class RunningRequests:
    """Requests in order of arrival. One is known by the id of its answer and by its ``x-request-id``."""

    def __init__(self) -> None:
        self._requests: dict[int, tuple[frozenset[str], Cancellable]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._requests)

    @contextmanager
    def entered(self, ids: frozenset[str], request: Cancellable) -> Iterator[None]:
        """Keep ``request`` while the block runs."""
        key, self._next = self._next, self._next + 1
        self._requests[key] = (ids, request)
        try:
            yield
        finally:
            del self._requests[key]

    def named(self, request_id: str) -> list[Cancellable]:
        """Return those of this id: clients may use one for several."""
        return [request for ids, request in self._requests.values() if request_id in ids]

    def describe(self, now_s: float) -> list[dict[str, Any]]:
        return [request.describe(now_s) for _, request in self._requests.values()]
