"""The fake executor by its name, for clients that build an engine: ``FAKE``, or ``f"{FAKE}@20"`` for 20 ms per step."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from tests.fakes.executor import FakeDrafts, FakeExecutor
from tests.fakes.model import FakeModel

from quire.config import EngineConfig
from quire.executor.base import Executor
from quire.step import StepPlan, StepResult

FAKE = "tests.fakes.engine:build"
_ROOT = str(Path(__file__).resolve().parents[2])

# The engine's child process imports this module too.
if _ROOT not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), _ROOT]))


def build(config: EngineConfig, step_ms: str) -> Executor:
    """Return a fake executor for ``config`` whose steps take at least ``step_ms``."""
    fake = FakeExecutor(config.cache, model=FakeModel(vocab_size=config.model.spec.vocab_size))
    return Paced(fake, float(step_ms) / 1e3) if step_ms else fake


DRAFTING = "tests.fakes.engine:build_drafting"


def build_drafting(config: EngineConfig, drafts: str) -> Executor:
    """Return a fake executor that proposes as many drafts as it may; ``drafts``: the share that is wrong."""
    model = FakeModel(vocab_size=config.model.spec.vocab_size)
    return FakeExecutor(
        config.cache, model=model, drafts=FakeDrafts(config.scheduler.max_num_drafts, float(drafts))
    )


class Paced:
    """An executor slowed down to a step of at least ``step_s`` seconds."""

    def __init__(self, inner: Executor, step_s: float) -> None:
        self.max_in_flight, self.chains_steps = inner.max_in_flight, inner.chains_steps
        self._inner = inner
        self._step_s = step_s

    def submit(self, plan: StepPlan) -> None:
        self._inner.submit(plan)

    def collect(self) -> StepResult:
        time.sleep(self._step_s)
        return self._inner.collect()

    def close(self) -> None:
        self._inner.close()


CRASHING = "tests.fakes.engine:build_crashing"


def build_crashing(config: EngineConfig, last: str) -> Executor:
    """Return a fake executor whose ``last``-th result is one of another step, which the scheduler does not survive."""
    return Crashing(build(config, ""), int(last))


class Crashing:
    """Delegates to ``inner`` until its last result."""

    def __init__(self, inner: Executor, last: int) -> None:
        self.max_in_flight, self.chains_steps = inner.max_in_flight, inner.chains_steps
        self._inner, self._left = inner, last

    def submit(self, plan: StepPlan) -> None:
        self._inner.submit(plan)

    def collect(self) -> StepResult:
        result = self._inner.collect()
        self._left -= 1
        return result if self._left else replace(result, step=-5)

    def close(self) -> None:
        self._inner.close()
