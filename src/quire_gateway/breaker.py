"""`Breaker`: passive health of one backend, from the outcomes of real requests. Pure: times are arguments.

closed ── failures ──► open ── time ──► half-open ── successes ──► closed, with a slow start
                        ▲                   │
                        └──── a failure ────┘   (and each time it stays open twice as long)
"""

from __future__ import annotations

from typing import Literal

from quire_gateway.config import HealthArgs

BreakerState = Literal["closed", "open", "half-open"]
WINDOW_S = 10.0
MIN_REQUESTS = 20  # in a window, before the share of failures counts
TRIALS = 2  # successes that close a half-open breaker
_SLOWEST_START = 0.1  # share of its traffic that a recovered backend begins with


class Breaker:
    """Whether a backend may get requests, and what share of them."""

    def __init__(self, args: HealthArgs) -> None:
        self._args = args
        self.num_ejections = 0
        self.in_row = 0  # failures since the last success
        self.window = (0.0, 0, 0)  # start, requests, failures
        self._open_until: float | None = None  # None: closed
        self._open_s = args.open_s
        self._trials = 0  # successes while half-open
        self._on_trial = 0  # requests out while half-open
        self._recovered_s: float | None = None

    def state(self, now: float) -> BreakerState:
        if self._open_until is None:
            return "closed"
        return "open" if now < self._open_until else "half-open"

    def allows(self, now: float) -> bool:
        """Whether a request may go there now; half-open, one at a time."""
        if self._open_until is None:
            return True
        return now >= self._open_until and self._on_trial == 0

    def taken(self, now: float) -> None:
        """A request goes there; `succeeded`, `failed` or `withdrawn` follows."""
        if self._open_until is not None:
            self._on_trial += 1

    def withdrawn(self) -> None:
        """The request ended without saying anything about the backend: its client left."""
        self._on_trial = max(self._on_trial - 1, 0)

    def succeeded(self, now: float) -> None:
        self.withdrawn()
        self.in_row = 0
        self._count(now, 0)
        if self.state(now) == "half-open":
            self._trials += 1
            if self._trials >= TRIALS:
                self._open_s = self._args.open_s
                self.close(now)
                self.recover(now)

    def failed(self, now: float) -> None:
        """A server error, a timeout, a broken connection, or a first token far later than predicted."""
        self.withdrawn()
        self.in_row += 1
        self._count(now, 1)
        _, requests, failures = self.window
        share = failures / requests if requests >= MIN_REQUESTS else 0.0
        state = self.state(now)
        if state == "half-open" or (
            state == "closed" and (self.in_row >= self._args.max_failures or share >= self._args.error_share)
        ):
            self._open(now)

    def close(self, now: float) -> None:
        """Forget the failures; after a restart they are those of another process.

        The next opening is as long as it would have been, for a process that fails in each of its lives.
        """
        self._open_until = None
        self.in_row = self._trials = self._on_trial = 0
        self.window = (now, 0, 0)

    def recover(self, now: float) -> None:
        """The backend is back: its share of the traffic grows from now on."""
        self._recovered_s = now

    def share(self, now: float) -> float:
        """Return the share (0…1) of its traffic that the backend gets: below 1 during the slow start."""
        if self._recovered_s is None or self._args.slow_start_s <= 0:
            return 1.0
        share = (now - self._recovered_s) / self._args.slow_start_s
        return min(max(share, _SLOWEST_START), 1.0)

    def _open(self, now: float) -> None:
        self._open_until = now + self._open_s
        self._open_s = min(2 * self._open_s, self._args.max_open_s)
        self._trials = self._on_trial = self.in_row = 0
        self.num_ejections += 1

    def _count(self, now: float, failures: int) -> None:
        start, requests, failed = self.window
        if now - start > WINDOW_S:
            start, requests, failed = now, 0, 0
        self.window = (start, requests + 1, failed + failures)
