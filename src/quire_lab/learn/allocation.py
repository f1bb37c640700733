"""The same requests through two memories: the scheduler with its paged cache, and contiguous reservations.

Either way a step gives each running request one token, and the requests wait in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.config import CacheConfig, SchedulerConfig
from quire.executor.timed import StepLedger
from quire.request import Request, SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.step import StepPlan
from quire_lab.learn.contiguous import ContiguousPool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The memory after one step, in tokens. ``held``: request → its places; ``used``: request → tokens in them."""

    held: Mapping[int, tuple[int, ...]]  # block ids, or (start, end) of a range
    used: Mapping[int, int]
    num_reserved: int

    @property
    def num_used(self) -> int:
        return sum(self.used.values())


@dataclass(frozen=True, slots=True)
class Run:
    """All steps of one memory."""

    snapshots: tuple[Snapshot, ...]

    @property
    def waste(self) -> float:
        """Share of the reserved places without a token, over all steps."""
        reserved = sum(s.num_reserved for s in self.snapshots)
        return 1.0 - sum(s.num_used for s in self.snapshots) / reserved

    @property
    def mean_running(self) -> float:
        return sum(len(s.used) for s in self.snapshots) / len(self.snapshots)


class BlockTables:
    """The block tables as a worker knows them, from the plans alone."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}  # request → block ids
        self.num_tokens: dict[int, int] = {}
        self._request: dict[int, int] = {}  # seq_id → request

    def take(self, plan: StepPlan) -> None:
        """Apply the plan's differences."""
        for seq_id in plan.gone:
            request = self._request.pop(seq_id, None)
            if request is not None:
                self.rows.pop(request, None)
                self.num_tokens.pop(request, None)
        for new in plan.new_seqs:
            self._request[new.seq_id] = new.sampling.seed or 0
            self.rows[new.sampling.seed or 0] = []
        for seq in plan.seqs:
            request = self._request[seq.seq_id]
            if seq.new_block_ids:
                self.rows[request][seq.block_start[0] :] = seq.new_block_ids[0]
            self.num_tokens[request] = seq.num_computed_tokens + seq.num_scheduled_tokens


def paged(lengths: Sequence[tuple[int, int]], num_tokens: int, block_size: int, max_len: int) -> Run:
    """Run requests of (prompt, output) tokens through the engine's scheduler and block pool, a second a step."""
    config = SchedulerConfig(max_num_seqs=1024, max_num_batched_tokens=1 << 20, max_model_len=max_len)
    cache = CacheConfig(max(2, num_tokens // block_size), block_size, enable_prefix_caching=False)
    scheduler, ledger, tables = Scheduler(config, cache), StepLedger(), BlockTables()
    for index, (prompt, output) in enumerate(lengths):
        sampling = SamplingParams(max_tokens=output, seed=index, ignore_eos=True)
        scheduler.add(Request(f"r{index}", tuple(range(1, prompt + 1)), sampling, 0.0), 0.0)
    snapshots, now = [], 0.0
    while (plan := scheduler.plan(now)) is not None:
        tables.take(plan)
        now += 1.0
        if plan.seqs:
            used = {request: tuple(rows) for request, rows in tables.rows.items()}
            reserved = block_size * sum(map(len, used.values()))
            snapshots.append(Snapshot(used, dict(tables.num_tokens), reserved))
        scheduler.apply(ledger.take(plan).result, now)
    return Run(tuple(snapshots))


def contiguous(lengths: Sequence[tuple[int, int]], num_tokens: int, max_len: int) -> Run:
    """Run the same requests where each reserves ``max_len`` places in one range before it starts."""
    pool, waiting = ContiguousPool(num_tokens), deque(range(len(lengths)))
    used: dict[int, int] = {}
    snapshots = []
    while waiting or used:
        while waiting and pool.reserve(waiting[0], max_len):
            request = waiting.popleft()
            used[request] = lengths[request][0] - 1
        for request in used:
            used[request] += 1
        snapshots.append(Snapshot(dict(pool.ranges), dict(used), max_len * len(used)))
        for request in [r for r, n in used.items() if n >= sum(lengths[r]) - 1]:
            del used[request]
            pool.release(request)
    return Run(tuple(snapshots))
