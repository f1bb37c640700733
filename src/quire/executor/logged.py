"""`LoggedExecutor`: another executor, and a line of JSON for each step it computed: what it had to do, and how long.

    {"at_s": 12.031, "seconds": 0.00312, "after_s": 0.00017, "num_decodes": 7, "num_tokens": 7, "num_seqs": 7, …}

``at_s`` counts from the first step; ``after_s`` is how long nothing was out before it. `quire.plan.step_log` reads it.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

from quire.clock import Clock
from quire.errors import ConfigError
from quire.executor.base import Executor
from quire.plan.cost_model import features
from quire.step import StepPlan, StepResult


class LoggedExecutor:
    """An `Executor`; ``path`` is appended to.

    Raises:
        ConfigError: the file cannot be written to.
    """

    def __init__(self, inner: Executor, path: Path, clock: Clock) -> None:
        self.max_in_flight = inner.max_in_flight
        self._inner = inner
        self._clock = clock
        try:
            self._file = path.open("a", buffering=1)  # a line at a time: a killed engine loses none
        except OSError as error:
            raise ConfigError(f"step_log = {str(path)!r} cannot be written to: {error.strerror}") from error
        self._out: deque[tuple[StepPlan, float]] = deque()
        self._first_s = self._last_s = clock.now()

    def submit(self, plan: StepPlan) -> None:
        self._out.append((plan, self._clock.now()))
        self._inner.submit(plan)

    def collect(self) -> StepResult:
        result = self._inner.collect()
        plan, submitted_s = self._out.popleft()
        start_s, end_s = max(submitted_s, self._last_s), self._clock.now()
        if plan.seqs and result.error is None:
            step = features(plan, sum(1 for seq in result.seqs if seq.token_ids))
            line = {
                "at_s": round(start_s - self._first_s, 6),
                "seconds": round(end_s - start_s, 6),
                "after_s": round(start_s - self._last_s, 6),
                "num_decodes": sum(1 for seq in plan.seqs if seq.num_scheduled_tokens == 1),
                **step._asdict(),
            }
            self._file.write(json.dumps(line) + "\n")
        self._last_s = end_s
        return result

    def close(self) -> None:
        self._inner.close()
        self._file.close()
