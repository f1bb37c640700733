"""Clocks. Code below `engine/` receives `now` as an argument and never asks the system for it."""

from __future__ import annotations

import time
from typing import Protocol

# Seconds until something that was busy, full or unreachable is tried again; between two looks at what another task or
# process does; and the most between two signs of life of a server.
RETRY_S, LOOK_S, BEAT_S = 1.0, 0.05, 2.0


class Clock(Protocol):
    """A source of seconds. Only differences are meaningful."""

    def now(self) -> float:
        """Return the current time in seconds, never decreasing."""
        ...


class WallClock:
    """CLOCK_MONOTONIC, the same clock in every process of a machine."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when told to: for the simulator and for tests."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds`` (≥ 0)."""
        assert seconds >= 0.0
        self._now_s += seconds

    def advance_to(self, when_s: float) -> None:
        """Move forward to ``when_s``; a time already passed leaves the clock where it is."""
        self._now_s = max(self._now_s, when_s)
