"""`lasting`: a limit of time that does not count what this process's loop itself is late.

A loop that was busy for three seconds fires a timer of two seconds before it looks at the socket that was ready all the
while. Here the time passes in `TICKS` parts: each is over at the earliest when the loop has come round once more, so
that what has come in the meantime is seen first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

TICKS = 8
FLUSH_S = 0.1  # rows and lines are written together after it


class Limit:
    """The time that a block has yet."""

    def __init__(self, deadline: asyncio.Timeout) -> None:
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._num_left, self._part_s = 0, 0.0

    def renew(self, limit_s: float | None) -> None:
        """Let the block last so much longer from now on; None: as long as it takes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if limit_s is not None:
            self._num_left, self._part_s = TICKS, max(0.0, limit_s) / TICKS
            self._tick()

    def _tick(self) -> None:
        if self._num_left:
            self._num_left -= 1
            self._timer = self._loop.call_later(self._part_s, self._tick)
        else:
            self._deadline.reschedule(self._loop.time())


@asynccontextmanager
async def lasting(limit_s: float | None) -> AsyncGenerator[Limit, None]:
    """Raise `TimeoutError` in the block after ``limit_s`` seconds of a loop that keeps up; None: there is no limit."""
    async with asyncio.timeout(None) as deadline:
        limit = Limit(deadline)
        limit.renew(limit_s)
        try:
            yield limit
        finally:
            limit.renew(None)
