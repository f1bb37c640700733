"""`Search`: the cheapest setting that holds an SLO; each candidate is simulated with the real scheduler and router.

A setting is the number of devices per replica (tp), the number of replicas, and the chunk budget. It holds the SLO
where ``share`` of the requests meet it. More replicas never hold less, so the fewest for each tp are found by
bisection, and settings that cannot be cheaper than the best so far are not simulated. Chunk budgets are tried in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.config import CacheConfig, SchedulerConfig
from quire.cost.split import Split
from quire.errors import ConfigError
from quire_lab.bench.summary import summarize
from quire_lab.plan.candidates import candidates
from quire_lab.plan.capacity import NEAR, Question
from quire_lab.sim.replica import ClusterConfig
from quire_lab.sim.run import simulate
from quire_lab.workload.request import Workload

CHUNKS = (2048, 512, 8192)  # max_num_batched_tokens, in the order of the trials


@dataclass(frozen=True, slots=True)
class Setting:
    """One point of the grid."""

    tp: int
    replicas: int
    max_num_batched_tokens: int

    @property
    def num_devices(self) -> int:
        return self.tp * self.replicas


@dataclass(frozen=True, slots=True)
class Tried:
    """A simulated setting. Where ``usd_per_hour`` is None, the price is unknown and devices are counted instead."""

    setting: Setting
    usd_per_hour: float | None
    share: float  # share of the requests that met the SLO
    ttft_p95_ms: float | None
    tpot_p95_ms: float | None
    goodput_per_s: float

    @property
    def cost(self) -> float:
        return self.usd_per_hour if self.usd_per_hour is not None else float(self.setting.num_devices)


@dataclass(frozen=True, slots=True)
class Found:
    """``best`` None: no setting of the grid holds the SLO."""

    best: Tried | None
    tried: tuple[Tried, ...]
    grid_size: int


class Search:
    """One question over one workload. The results of simulations are kept."""

    def __init__(
        self, question: Question, workload: Workload, chunks: Sequence[int] = CHUNKS, share: float = NEAR
    ) -> None:
        if question.slo is None:
            raise ConfigError("--search needs --slo: it looks for the cheapest setting that holds one")
        self.question, self.workload, self.chunks, self.share = question, workload, tuple(chunks), share
        self._longest = max(r.num_tokens for r in workload.requests)
        self._tried: dict[Setting, Tried] = {}

    def grid(self, max_replicas: int | None = None) -> list[Setting]:
        """Return every setting of at most ``count`` devices whose replicas fit in memory."""
        settings = []
        for split in self._splits():
            most = self.question.count // split.tp
            for replicas in range(1, min(most, max_replicas or most) + 1):
                settings += [Setting(split.tp, replicas, chunk) for chunk in self.chunks]
        return settings

    def find(self, max_replicas: int | None = None) -> Found:
        """Bisect the number of replicas for each tp, the smallest tp first."""
        best: Tried | None = None
        for split in self._splits():
            low, high = 0, min(self.question.count // split.tp, max_replicas or self.question.count)
            if best is not None:  # only cheaper settings are of interest
                high = min(high, (best.setting.num_devices - 1) // split.tp)
            if high < 1 or (trial := self._holds(split.tp, high)) is None:
                continue
            while high - low > 1:  # low does not hold, high does
                middle = (low + high) // 2
                fewer = self._holds(split.tp, middle)
                low, high, trial = (middle, high, trial) if fewer is None else (low, middle, fewer)
            best = trial  # cheaper than the previous best: ``high`` started below it
        return Found(best, tuple(self._tried.values()), len(self.grid(max_replicas)))

    def attempt(self, setting: Setting) -> Tried:
        """Simulate one setting."""
        if setting not in self._tried:
            self._tried[setting] = self._simulate(setting)
        return self._tried[setting]

    def _splits(self) -> list[Split]:
        q = self.question
        cuts = [s for s in candidates(q.spec, q.hardware, q.count) if s.pp == 1]
        return [s for s in cuts if q.memory(s, self._longest).fits]

    def _holds(self, tp: int, replicas: int) -> Tried | None:
        for chunk in self.chunks:
            tried = self.attempt(Setting(tp, replicas, chunk))
            if tried.share >= self.share:
                return tried
        return None

    def _simulate(self, setting: Setting) -> Tried:
        q = replace(self.question, max_num_batched_tokens=setting.max_num_batched_tokens)
        split = Split(tp=setting.tp)
        memory = q.memory(split, self._longest)
        blocks = memory.max_requests * -(-self._longest // 16)  # each replica fits at least one request
        scheduler = SchedulerConfig(
            max_num_seqs=q.max_num_seqs,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            long_prefill_token_threshold=q.long_prefill_token_threshold,
            max_model_len=self._longest,
            max_queue=len(self.workload.requests),
        )
        step_time = q.steps(split)
        cluster = ClusterConfig(scheduler, CacheConfig(num_blocks=blocks + 2), num_replicas=setting.replicas)
        summary = summarize(simulate(cluster, step_time, self.workload).records, slo=q.slo)
        met = summary["goodput_per_s"] * summary["duration_s"]
        price = q.hardware.price
        return Tried(
            setting=setting,
            usd_per_hour=price.usd * setting.num_devices if price else None,
            share=met / len(self.workload.requests),
            ttft_p95_ms=summary["ttft_ms"]["p95"],
            tpot_p95_ms=summary["tpot_ms"]["p95"],
            goodput_per_s=summary["goodput_per_s"],
        )
