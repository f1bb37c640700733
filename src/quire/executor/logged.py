"""`LoggedExecutor`: another executor, and a line of JSON for each step it computed: what it had to do, and how long.

    {"at_s": 12.031, "seconds": 0.00312, "after_s": 0.00017, "num_decodes": 7, "num_tokens": 7, "num_seqs": 7, …}

``at_s`` counts from the start of the engine; ``after_s`` is how long nothing was out before the step. With speculation,
``drafts`` has what was verified and proposed: the seconds of proposing, which are not in ``seconds``.
`quire.cost.profile` reads it.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections import deque
from pathlib import Path
from typing import Any, TextIO

from quire.clock import Clock
from quire.cost.cost_model import features
from quire.cost.draft_cost import DraftLedger
from quire.errors import ConfigError
from quire.executor.base import Executor
from quire.step import StepPlan, StepResult

_log = logging.getLogger(__name__)


class LoggedExecutor:
    """An `Executor`; ``path`` is appended to. Where that fails later (a full disk), the log ends and the steps go on.

    Raises:
        ConfigError: the file cannot be written to.
    """

    def __init__(self, inner: Executor, path: Path, clock: Clock, max_rows: int | None = None) -> None:
        """``max_rows``: of a draft model's forward pass."""
        self.max_in_flight, self.chains_steps = inner.max_in_flight, inner.chains_steps
        self._inner = inner
        self._clock = clock
        try:
            self._file: TextIO | None = path.open(
                "a", buffering=1
            )  # a line at a time: a killed engine loses none
        except OSError as error:
            raise ConfigError(f"step_log = {str(path)!r} cannot be written to: {error.strerror}") from error
        self._out: deque[tuple[StepPlan, float]] = deque()
        self._first_s = self._last_s = clock.now()
        self._ledger = DraftLedger(max_rows)

    def submit(self, plan: StepPlan) -> None:
        self._out.append((plan, self._clock.now()))
        self._inner.submit(plan)

    def collect(self) -> StepResult:
        result = self._inner.collect()
        plan, submitted_s = self._out.popleft()
        start_s, end_s = max(submitted_s, self._last_s), self._clock.now()
        work = self._ledger.take(plan, result)
        if plan.seqs and result.error is None:
            step = features(plan, {seq.seq_id for seq in result.seqs if seq.token_ids})
            line: dict[str, Any] = {
                "at_s": round(start_s - self._first_s, 6),
                "seconds": round(end_s - start_s - result.draft_s, 6),
                "after_s": round(start_s - self._last_s, 6),
                "num_decodes": sum(seq.num_known_tokens == 1 for seq in plan.seqs),
                **step._asdict(),
            }
            verified = [
                (seq_plan.num_draft_tokens, len(seq_result.token_ids) - 1)
                for seq_plan, seq_result in zip(plan.seqs, result.seqs, strict=False)
                if seq_plan.num_draft_tokens and seq_result.token_ids
            ]
            if verified or work.num_forwards:
                line["drafts"] = {"seconds": round(result.draft_s, 6), "work": work, "verified": verified}
            self._write(json.dumps(line) + "\n")
        self._last_s = end_s
        return result

    def close(self) -> None:
        self._inner.close()
        if self._file is not None:
            self._file.close()

    def _write(self, line: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line)
        except OSError as error:
            _log.error("the step log ends here: %s", error)
            with contextlib.suppress(OSError):  # buffered lines cannot be written either
                self._file.close()
            self._file = None
