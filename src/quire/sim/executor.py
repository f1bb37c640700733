"""`SimExecutor`: steps that take a modelled time on a virtual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from quire.clock import VirtualClock
from quire.errors import StepError
from quire.executor.timed import StepLedger
from quire.sim.latency import Latency
from quire.step import StepPlan, StepResult


class SimExecutor:
    """Reports when each plan will be over (``on_submit``, seconds) and returns its result at that time.

    Plans are computed one after the other, as on one device; at most ``max_in_flight`` are in flight.
    """

    chains_steps = True

    def __init__(
        self,
        latency: Latency,
        clock: VirtualClock,
        on_submit: Callable[[float], None],
        *,
        max_in_flight: int = 1,
    ) -> None:
        assert max_in_flight >= 1
        self.max_in_flight = max_in_flight
        self.slowdown = 1.0  # of the steps submitted from now on
        self.num_steps = 0
        self.busy_s = 0.0
        self._latency = latency
        self._clock = clock
        self._on_submit = on_submit
        self._ledger = StepLedger(restores=latency.swaps)
        self._free_s = 0.0  # when the last plan submitted is over
        self._out: deque[tuple[StepResult, float]] = deque()

    def submit(self, plan: StepPlan) -> None:
        """Take a plan; fewer than ``max_in_flight`` are out."""
        assert len(self._out) < self.max_in_flight
        taken = self._ledger.take(plan)
        seconds = self._latency.seconds(taken) * self.slowdown
        self._free_s = max(self._free_s, self._clock.now()) + seconds
        self.num_steps += 1
        self.busy_s += seconds
        self._out.append((taken.result, self._free_s))
        self._on_submit(self._free_s)

    def collect(self) -> StepResult:
        """Return the result of the oldest plan; it is over by now."""
        result, over_s = self._out.popleft()
        if self._clock.now() < over_s:
            raise StepError(f"step {result.step} is over at {over_s} s, and it is {self._clock.now()} s")
        return result

    def close(self) -> None:
        """Forget what is out."""
        self._out.clear()
