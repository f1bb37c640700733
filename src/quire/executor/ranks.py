"""`RanksExecutor`: the model cut over the ranks of this machine, one process each. Torch-free.

submit(plan)   one broadcast: the plan, and what was sampled in the steps collected since the plan before
collect()      the answering rank's result: the first rank of the last stage samples
"""

from __future__ import annotations

from collections.abc import Callable

from quire.clock import Clock, WallClock
from quire.config import EngineConfig
from quire.executor.rank_group import RankGroup
from quire.executor.rank_messages import RankStep, Told, encode
from quire.executor.rank_processes import start_here
from quire.metrics.engine_stats import RankAbout, RankStats
from quire.metrics.log import Log
from quire.step import StepPlan, StepResult

log = Log("ranks")


class RanksExecutor:
    """As `LocalExecutor`, but the death of a rank is the engine's.

    Building raises `ModelLoadError`, `ConfigError` or `EngineDeadError`; `submit` and `collect` raise `EngineDeadError`
    once a rank has died, and every process of the group has ended then.
    """

    def __init__(
        self,
        config: EngineConfig,
        clock: Clock | None = None,
        start: Callable[[EngineConfig], RankGroup] = start_here,
    ) -> None:
        """``start`` starts the ranks: here, or on other machines."""
        stages = config.topology.pp
        self.max_in_flight = stages
        self.chains_steps = stages == 1
        self._told: list[Told] = []
        self._group = start(config)
        self.loaded = self._group.loaded
        self._about = tuple(
            RankAbout(
                rank.host,
                rank.pid,
                config.topology.coordinates(rank.rank).pp,
                rank.num_cores,
                rank.weight_bytes,
                not rank.call_by_call,
            )
            for rank in self.loaded
        )
        self._clock = clock or WallClock()
        self._num_out, self._out_since_s, self._out_s = 0, 0.0, 0.0

    @property
    def pids(self) -> list[int]:
        """The processes, by rank."""
        return [rank.pid for rank in self.loaded]

    def submit(self, plan: StepPlan) -> None:
        """Send a plan to every rank; fewer than ``max_in_flight`` are out."""
        assert self._num_out < self.max_in_flight
        if not self._num_out:
            self._out_since_s = self._clock.now()
        self._num_out += 1
        outcomes, self._told = tuple(self._told), []
        self._group.broadcast(encode(RankStep(plan, outcomes)))

    def collect(self) -> StepResult:
        """Wait for the answer to the oldest plan."""
        result, outcome = self._group.answer()
        self._told.append(outcome)
        self._num_out -= 1
        if not self._num_out:
            self._out_s += self._clock.now() - self._out_since_s
        return result

    def rank_stats(self) -> RankStats:
        """Return how long steps were out, and what each rank did meanwhile."""
        counts = self._group.counts
        now_s = self._clock.now() - self._out_since_s if self._num_out else 0.0
        return RankStats(
            self._out_s + now_s,
            tuple(rank.busy_s for rank in counts),
            tuple(rank.bytes_sent for rank in counts),
            tuple(load for _, load in sorted(self._group.experts.items())),
            self._group.num_moved,
            self._about,
            tuple(rank.peak_bytes for rank in counts),
            tuple(rank.num_steps for rank in counts),
        )

    def close(self) -> None:
        """End the ranks, and log what they did. Nothing is submitted any more."""
        stats = self.rank_stats()
        if stats.out_s:
            log.info(
                "ranks_closed",
                busy=" ".join(f"{share:.0%}" for share in stats.busy_shares),
                idle=f"{stats.bubbles:.1%}",
                seconds=stats.out_s,
            )
        self._group.close()
