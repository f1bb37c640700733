"""`RanksExecutor`: the model cut over the ranks of this machine, one process each. Torch-free.

submit(plan)   one broadcast: the plan, and what was sampled in the steps collected since the plan before
collect()      the answering rank's result: the first rank of the last stage samples
"""

from __future__ import annotations

from quire.clock import Clock
from quire.config import EngineConfig
from quire.executor.rank_group import RankGroup
from quire.executor.rank_messages import RankStep, Told, encode
from quire.step import StepPlan, StepResult


class RanksExecutor:
    """As `LocalExecutor`, but the death of a rank is the engine's.

    Building raises `ModelLoadError`, `ConfigError` or `EngineDeadError`; `submit` and `collect` raise `EngineDeadError`
    once a rank has died, and every process of the group has ended then.
    """

    def __init__(self, config: EngineConfig, clock: Clock | None = None) -> None:
        stages = config.topology.pp
        self.max_in_flight = stages
        self.chains_steps = stages == 1
        self._told: list[Told] = []
        self._group = RankGroup(config)
        self.loaded = self._group.loaded

    @property
    def pids(self) -> list[int]:
        """The processes, by rank."""
        return self._group.pids

    def submit(self, plan: StepPlan) -> None:
        """Send a plan to every rank; fewer than ``max_in_flight`` are out."""
        told, self._told = tuple(self._told), []
        self._group.broadcast(encode(RankStep(plan, told)))

    def collect(self) -> StepResult:
        """Wait for the answer to the oldest plan."""
        result, told = self._group.answer()
        self._told.append(told)
        return result

    def close(self) -> None:
        """End the ranks. Nothing is submitted any more."""
        self._group.close()
