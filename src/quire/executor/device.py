"""`DeviceExecutor`: the worker of a GPU in this process, two steps in flight.

`submit` launches a step and returns while the GPU computes it; `collect` waits for the oldest. The device's work is in
order, so a step that was launched behind another sees all that it wrote.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from functools import partial

import torch

from quire.clock import Clock, WallClock
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.executor.base import failed
from quire.kernels.threads import QUIET_S, BetweenSteps
from quire.kernels.triton_interpreter import interpreting
from quire.models.loader import iter_weights
from quire.quant.stored import Weight
from quire.runner.device_runner import DeviceRunner, torch_device
from quire.runner.memory import torch_dtype
from quire.runner.memory_check import MemoryCheck, Meter, check_memory
from quire.runner.worker import Launched, Worker
from quire.step import StepPlan, StepResult

_log = logging.getLogger(__name__)


class DeviceExecutor:
    """As `LocalExecutor`; ``weights`` replaces the checkpoint that ``config.model`` names.

    On a GPU the largest step is tried before the first request; `memory` compares what it took with what was expected.
    """

    max_in_flight = 2
    chains_steps = True

    def __init__(
        self, config: EngineConfig, *, clock: Clock | None = None, weights: Iterable[tuple[str, Weight]] | None = None
    ) -> None:  # fmt: skip
        _check_device(config)
        dtype, device = torch_dtype(config.model.dtype), torch_device(config.device.kind)
        stream = iter_weights(config.model, dtype, device) if weights is None else weights
        clock = clock or WallClock()
        self.worker = Worker(config, stream, clock, partial(DeviceRunner, clock=clock))
        self.memory: MemoryCheck | None = None
        if config.device.kind == "cuda":
            self.memory = check_memory(config, self.worker.execute, Meter())
            _log.info("%s", self.memory)
        self._between = BetweenSteps(clock)
        if config.runner.prepares_grammars:
            eos = config.model.spec.eos_token_ids
            self.worker.runner.grammars.prepare(eos, partial(self._between.wait, QUIET_S))
        self._out: deque[Launched | StepResult] = deque()  # a result: the step failed when it was launched

    def submit(self, plan: StepPlan) -> None:
        """Launch a plan; fewer than two are out."""
        assert len(self._out) < self.max_in_flight, "two steps at a time: collect the oldest first"
        self._between.step_begins()
        try:
            self._out.append(self.worker.launch(plan))
        except Exception as error:
            self._out.append(failed(plan, error))

    def collect(self) -> StepResult:
        """Wait for the oldest plan, and return its result."""
        assert self._out, "nothing was submitted"
        oldest = self._out.popleft()
        if isinstance(oldest, StepResult):
            if not self._out:
                self._between.step_ended()
            return oldest
        try:
            result = self.worker.finish(oldest)
            if not self._out:  # a core that has more to compute has submitted it by now
                self.worker.runner.idle()
            return result
        except Exception as error:
            return failed(oldest.plan, error)
        finally:
            if not self._out:
                self._between.step_ended()

    def close(self) -> None:
        """Give the weights and the KV cache back. Nothing is submitted any more."""
        self._between.close()
        self._out.clear()
        del self.worker


def _check_device(config: EngineConfig) -> None:
    """Raise `ConfigError` where torch and Triton cannot do what the configuration says."""
    if config.device.kind == "interpret" and not interpreting():
        raise ConfigError(
            "device = 'interpret' needs TRITON_INTERPRET=1 in the environment, before Quire starts"
        )
    if config.device.kind == "cuda" and interpreting():
        raise ConfigError("TRITON_INTERPRET is set, and device = 'cuda' runs compiled kernels: unset it")
    if config.device.kind == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda or "a CPU"
        raise ConfigError(
            f"device = 'cuda': torch {torch.__version__} is built for {built} and sees no GPU; install torch with CUDA"
        )
