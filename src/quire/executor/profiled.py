"""`Profiler`: a trace of some steps of a CPU engine, as JSON that Perfetto and chrome://tracing open.

While a profile is on, the worker's step, sampling and replay are wrapped on their instances, and a recorded step is
replayed with the time of each native call. Off, nothing is wrapped: a step runs the code that it always runs.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from quire.clock import Clock
from quire.config import EngineConfig
from quire.cost.cost_model import StepFeatures, features
from quire.cost.hardware import this_machine
from quire.errors import ConfigError
from quire.executor.local import LocalExecutor
from quire.step import StepPlan, StepResult

MAX_STEPS = 1000
NUM_TOP = 5
_log = logging.getLogger(__name__)


class Profiler:
    """Profiles of the worker of ``executor``, one at a time."""

    def __init__(self, executor: LocalExecutor, config: EngineConfig, clock: Clock) -> None:
        self._worker, self._config, self._clock = executor.worker, config, clock
        # Now, since it takes a second or more: later, the engine would seem to hang.
        self._bandwidth = this_machine(config.device, config.runner.num_threads).bandwidth
        self._events: list[dict[str, Any]] = []
        self._seconds: dict[str, list[float]] = {}  # op → of each call
        self._bytes: dict[str, float] = {}
        self._left = 0  # steps; 0: off
        self._num_steps = 0

    def start(self, num_steps: int | None) -> dict[str, Any]:
        """Profile the next steps, `MAX_STEPS` where their number is open. Raises ConfigError: a profile is on."""
        if self._left:
            raise ConfigError("A profile is on already: POST /stop_profile ends it.")
        self._events, self._seconds, self._bytes, self._num_steps = [], {}, {}, 0
        self._left = num_steps or MAX_STEPS
        worker, runner = self._worker, self._worker.runner
        worker.execute = self._step(worker.execute)  # type: ignore[method-assign,assignment]
        runner._sample = self._slice("sample", runner._sample)  # type: ignore[attr-defined]
        if (tape := runner.tape) is not None:  # type: ignore[attr-defined]
            tape.run = self._replay(tape)
        return {"state": "on", "num_steps": self._left}

    def stop(self) -> dict[str, Any]:
        """End the profile and write it; return its path and the ops that took longest. Raises ConfigError."""
        if not self._left:
            raise ConfigError("No profile is on: POST /start_profile begins one.")
        self._left = 0
        runner = self._worker.runner
        del self._worker.execute, runner._sample  # type: ignore[attr-defined]
        if (tape := runner.tape) is not None:  # type: ignore[attr-defined]
            del tape.run
        top = self._top(self._bandwidth)
        folder = Path(self._config.runner.profile_dir or "")
        path = folder / f"quire-profile-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{os.getpid()}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump({"traceEvents": self._events, "otherData": {"top": top}}, file)
        except OSError as error:
            raise ConfigError(f"The profile cannot be written to {path}: {error.strerror}") from None
        shares = ", ".join(f"{one['op']} {one['share']:.0%}" for one in top)
        _log.warning("profile of %d steps in %s: %s", self._num_steps, path, shares)
        return {"state": "off", "path": str(path), "num_steps": self._num_steps, "top": top}

    def _step(self, execute: Callable[[StepPlan], StepResult]) -> Callable[[StepPlan], StepResult]:
        def profiled(plan: StepPlan) -> StepResult:
            start_s = self._clock.now()
            result = execute(plan)
            work = features(plan, {seq.seq_id for seq in result.seqs if seq.token_ids})
            self._add("step", start_s, self._clock.now(), step=plan.step, **work._asdict())
            self._count_bytes(work)
            self._num_steps += 1
            if self._num_steps >= self._left:
                try:
                    self.stop()
                except ConfigError as error:
                    _log.error("%s", error)
            return result

        return profiled

    def _slice(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def profiled(*args: Any) -> Any:
            start_s = self._clock.now()
            result = function(*args)
            end_s = self._clock.now()
            self._add(name, start_s, end_s)
            self._seconds.setdefault(name, []).append(end_s - start_s)
            return result

        return profiled

    def _replay(self, tape: Any) -> Callable[[int, int], torch.Tensor]:
        def profiled(num_tokens: int, num_logits: int) -> torch.Tensor:
            start_s = at_s = self._clock.now()
            for name, seconds in tape.run_calls(num_tokens, num_logits):
                self._add(name, at_s, at_s + seconds)
                self._seconds.setdefault(name, []).append(seconds)
                at_s += seconds
            self._add("forward", start_s, self._clock.now(), tokens=num_tokens, logits=num_logits)
            output: torch.Tensor = tape.output[:num_logits]
            return output

        return profiled

    def _count_bytes(self, work: StepFeatures) -> None:
        """Add what the step's matrices and K/V need to be read for, once each."""
        model, cache = self._config.model, self._config.cache
        of_block = self._config.kv_layout.block_bytes(cache.block_size, model.kv_dtype)
        weights = model.spec.weight_bytes(model.dtype, model.formats)
        kv = (work.decode_kv_tokens + work.chunk_kv_tokens) * of_block / cache.block_size
        for name, num_bytes in (("Linear", weights), ("Attention", kv)):
            self._bytes[name] = self._bytes.get(name, 0.0) + num_bytes

    def _top(self, bandwidth: float) -> list[dict[str, Any]]:
        """Return the ops that took longest; ``of_bound`` is the share of their time that reading their bytes takes."""
        total = sum(map(sum, self._seconds.values())) or 1.0
        rows: list[dict[str, Any]] = []
        for name, calls in sorted(self._seconds.items(), key=lambda item: -sum(item[1]))[:NUM_TOP]:
            seconds, num_bytes = sum(calls), self._bytes.get(name)
            bound = None if num_bytes is None or not seconds else num_bytes / bandwidth / seconds
            rows.append({"op": name, "calls": len(calls), "seconds": seconds, "share": seconds / total,
                         "bytes": num_bytes, "of_bound": bound})  # fmt: skip
        return rows

    def _add(self, name: str, start_s: float, end_s: float, **args: Any) -> None:
        self._events.append({"name": name, "ph": "X", "pid": 1, "tid": 1, "ts": start_s * 1e6,
                             "dur": (end_s - start_s) * 1e6, "args": args})  # fmt: skip
