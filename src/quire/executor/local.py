"""`LocalExecutor`: the worker in this process, one step in flight."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from quire.clock import Clock, WallClock
from quire.config import EngineConfig
from quire.executor.base import failed
from quire.kernels.threads import QUIET_S, BetweenSteps, choose_threads
from quire.models.packed_cache import CheckpointWeights, PackedSaver
from quire.quant.stored import Weight
from quire.runner.memory import PagesAhead, keep_freed_memory, torch_dtype
from quire.runner.worker import Worker
from quire.step import StepPlan, StepResult


class LocalExecutor:
    """Computes a plan when its result is collected, so that `submit` never blocks the core.

    ``weights`` (a stream of canonical name and tensor) replaces the checkpoint that ``config.model`` names: for tests.
    Building raises `ModelLoadError` or `ConfigError`; a step never raises: its error is in the `StepResult`.
    """

    max_in_flight = 1
    chains_steps = True

    def __init__(
        self, config: EngineConfig, *, clock: Clock | None = None, weights: Iterable[tuple[str, Weight]] | None = None
    ) -> None:  # fmt: skip
        torch_is_heavy = config.runner.backend == "reference"
        choose_threads(config.runner.num_threads, torch_is_heavy=torch_is_heavy)
        keep_freed_memory()
        clock = clock or WallClock()
        self.between = BetweenSteps(clock)
        self.saver: PackedSaver | None = None
        if weights is None:
            weights = CheckpointWeights(config.model, torch_dtype(config.model.dtype), config.runner)
        self.worker = Worker(config, weights, clock)
        if isinstance(weights, CheckpointWeights) and weights.saver is not None:
            self.saver = weights.saver
            self.saver.start(self.between)
        self._pages = PagesAhead(self.worker.runner.kv, self.between, config.scheduler.max_num_batched_tokens)
        self._pages.look()
        if config.runner.prepares_grammars:
            eos = config.model.spec.eos_token_ids
            self.worker.runner.grammars.prepare(eos, partial(self.between.wait, QUIET_S))
        self._pending: StepPlan | None = None

    def submit(self, plan: StepPlan) -> None:
        """Take a plan; the one before must have been collected."""
        assert self._pending is None, "one step at a time: collect the last one first"
        self._pending = plan
        self.between.step_begins()

    def collect(self) -> StepResult:
        """Compute the plan that was submitted and return its result."""
        plan = self._pending
        assert plan is not None, "nothing was submitted"
        self._pending = None
        try:
            return self.worker.execute(plan)
        except Exception as error:
            return failed(plan, error)
        finally:
            self.between.step_ended()
            self._pages.look()

    def close(self) -> None:
        """Give the weights and the KV cache back. Nothing is submitted any more."""
        self._pending = None
        self.between.close()
        self._pages.join()
        if self.saver is not None:
            self.saver.join()
        del self.worker
