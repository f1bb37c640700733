"""`Deadlines`: when which request's limits pass."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from quire.request import Deadline, Request


class Deadlines:
    """The limits of the requests at work, the next one first. Those of requests that ended stay until they are due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def add(self, request: Request) -> None:
        for limit_s in _limits(request.deadline):
            heapq.heappush(self._heap, (request.arrival_s + limit_s, request.request_id))

    def due(self, now: float) -> Iterator[str]:
        """Take out and yield the requests of which a limit has passed."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[1]

    @property
    def next_s(self) -> float | None:
        """When the next limit passes."""
        return self._heap[0][0] if self._heap else None


def _limits(deadline: Deadline | None) -> Iterator[float]:
    if deadline is not None:
        for limit_s in (deadline.first_token_s, deadline.total_s):
            if limit_s is not None:
                yield limit_s
