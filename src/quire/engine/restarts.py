"""`Restarts`: how often a process was started again lately, and how long to wait before the next time.

Pure: times are arguments. Restarts longer ago than the window count no more, neither for a limit nor for the pause.
"""

from __future__ import annotations

from collections import deque


class Restarts:
    """Restarts of one process."""

    def __init__(self, window_s: float, backoff_s: float, max_backoff_s: float) -> None:
        """``backoff_s``: the pause before the second restart in a window; doubled with each."""
        self._window_s = window_s
        self._backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._times_s: deque[float] = deque()

    def count(self, now_s: float) -> int:
        """Return how many there were within the window."""
        while self._times_s and now_s - self._times_s[0] > self._window_s:
            self._times_s.popleft()
        return len(self._times_s)

    def pause_s(self, now_s: float) -> float:
        """Return the pause before the next one."""
        pause_s = 0.0
        for _ in range(self.count(now_s)):
            pause_s = min(2 * pause_s or self._backoff_s, self._max_backoff_s)
        return pause_s

    def add(self, now_s: float) -> None:
        """One begins."""
        self._times_s.append(now_s)
