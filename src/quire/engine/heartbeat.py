"""`Heartbeat`: a page of memory in which the engine's loop notes each tick; `HangWatch` reads it in the API process.

    engine   beat(now, predicted_s, step)   before a step is computed, and four times a second while there is no work
    API      look(now)                      how long ago the last tick was, and how long the next one was to take

A tick is three stores into shared memory: no message, no system call. The watch counts only time in which it was itself
awake: a laptop that slept, or an API process that was stopped together with its engine, makes no engine late.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from quire.clock import Clock
from quire.step import StepPlan, StepResult

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Scheduler

IDLE_TICK_S = 0.25  # between two ticks of an engine without work
# Reading an adapter or building a grammar may add as much to a step.
SLOW_START_S = 20.0
# Probes tell within a second: what they answer is written ten times a second, and takes its turns on a busy machine.
HUNG_S = 0.75
# Doubles: the time of the tick, the predicted seconds until the next one, the step.
_SLOTS = 3


class Heartbeat:
    """The page, in the file ``path``. The engine writes it, the API process reads it."""

    def __init__(self, path: Path) -> None:
        """Map the page; the first side to come creates it."""
        with path.open("a+b") as file:
            if path.stat().st_size < mmap.PAGESIZE:
                file.write(bytes(mmap.PAGESIZE))  # written, so that a full disk fails here and not at a store
                file.flush()
            self._page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self._slots = memoryview(self._page).cast("d")[:_SLOTS]

    def beat(self, now_s: float, predicted_s: float, step: int) -> None:
        """Note a tick: the next is predicted in ``predicted_s``. Each store is one aligned word, the time goes last."""
        slots = self._slots
        slots[1] = predicted_s
        slots[2] = step
        slots[0] = now_s

    def read(self) -> tuple[float, float, int]:
        """Return what was noted last; the time is 0 before the first tick."""
        beat_s, predicted_s, step = self._slots.tolist()
        return beat_s, predicted_s, int(step)


class Ticker:
    """Called by the engine's loop with the steps out, before it may block."""

    def __init__(self, page: Heartbeat, scheduler: Scheduler, clock: Clock) -> None:
        self._page, self._scheduler, self._clock = page, scheduler, clock

    def __call__(self, out: Sequence[StepPlan | StepResult]) -> None:
        expected_s = self._scheduler.expected_s()
        for step in out:
            if isinstance(step, StepPlan) and (step.new_seqs or step.adapter_moves) and _starts_slowly(step):
                expected_s += SLOW_START_S
        self._page.beat(self._clock.now(), expected_s, out[0].step)

    def idle(self, now_s: float) -> None:
        """There is no work until a message comes; the next tick is in `IDLE_TICK_S`."""
        self._page.beat(now_s, IDLE_TICK_S, 0)


def _starts_slowly(plan: StepPlan) -> bool:
    """Whether a step reads an adapter, or waits for a new grammar."""
    return bool(plan.adapter_moves) or any(new.grammar is not None for new in plan.new_seqs)


class Pulse(NamedTuple):
    """What a look at the page says."""

    is_loading: bool  # there was no tick yet
    age_s: float  # since the last tick, while the watch was awake
    predicted_s: float  # from the last tick to the next
    step: int

    @property
    def is_hung(self) -> bool:
        """Whether the tick is overdue: by more than the predicted time once more, and `HUNG_S`."""
        return not self.is_loading and self.age_s > 2 * self.predicted_s + HUNG_S

    @property
    def overdue_s(self) -> float:
        return 0.0 if self.is_loading else self.age_s - self.predicted_s


class HangWatch:
    """Follows the ticks of one engine. Safe to share between threads, which look about every `IDLE_TICK_S`.

    Of a longer time between two looks only twice as much counts.
    """

    def __init__(self, page: Heartbeat, now_s: float) -> None:
        self._page = page
        self._lock = threading.Lock()
        self._looked_s = now_s
        self._awake_s = 0.0  # seconds in which the watch was awake
        self._beat_s = 0.0  # the last tick seen, and `_awake_s` at it
        self._awake_at_beat_s = 0.0

    def look(self, now_s: float) -> Pulse:
        """Return the engine's pulse as of ``now_s``, which is on the clock that the engine's ticks are on."""
        with self._lock:
            passed_s = min(max(0.0, now_s - self._looked_s), 2 * IDLE_TICK_S)
            self._looked_s = now_s
            self._awake_s += passed_s
            beat_s, predicted_s, step = self._page.read()
            if beat_s != self._beat_s:
                self._beat_s = beat_s
                self._awake_at_beat_s = self._awake_s - min(max(0.0, now_s - beat_s), passed_s)
            return Pulse(not beat_s, self._awake_s - self._awake_at_beat_s, predicted_s, step)
