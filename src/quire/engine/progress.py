"""`ProgressBar`: one line on a terminal's stderr, with nothing to install."""

from __future__ import annotations

import sys

from quire.clock import Clock

_INTERVAL_S = 0.1
_WIDTH = 24


class ProgressBar:
    """Shows requests done and tokens per second. Silent where stderr is not a terminal.

    |██████████··············|  107/256 requests  1823 tokens/s
    """

    def __init__(self, total: int, clock: Clock, *, shown: bool = True) -> None:
        self._total = total
        self._clock = clock
        self._shown = shown and sys.stderr.isatty()
        self._done = 0
        self._tokens = 0
        self._start_s = clock.now()
        self._drawn_s = float("-inf")

    def add(self, *, requests: int = 0, tokens: int = 0) -> None:
        """Count progress; draws at most ten times a second."""
        self._done += requests
        self._tokens += tokens
        if self._shown and self._clock.now() - self._drawn_s >= _INTERVAL_S:
            self._draw("\r")

    def close(self) -> None:
        """Draw the last state and end the line."""
        if self._shown:
            self._draw("\n")

    def _draw(self, end: str) -> None:
        self._drawn_s = self._clock.now()
        full = _WIDTH * self._done // max(1, self._total)
        rate = self._tokens / max(1e-9, self._drawn_s - self._start_s)
        bar = "█" * full + "·" * (_WIDTH - full)
        sys.stderr.write(f"\r|{bar}| {self._done:>5}/{self._total} requests  {rate:.0f} tokens/s {end}")
        sys.stderr.flush()
