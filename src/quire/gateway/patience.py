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


@asynccontextmanager
async def lasting(limit_s: float) -> AsyncGenerator[None, None]:
    """Raise `TimeoutError` in the block after ``limit_s`` seconds of a loop that keeps up."""
    loop = asyncio.get_running_loop()
    part_s = limit_s / TICKS
    timers: list[asyncio.TimerHandle] = []  # that have been started

    def tick() -> None:
        if len(timers) < TICKS:
            timers.append(loop.call_later(part_s, tick))
        else:
            deadline.reschedule(loop.time())

    async with asyncio.timeout(None) as deadline:
        tick()
        try:
            yield
        finally:
            timers[-1].cancel()
