"""`simulate`: run a workload through a cluster, with the faults of its configuration, from start to end."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quire.bench.summary import RequestRecord
from quire.executor.base import Executor
from quire.metrics.engine_stats import EngineStats
from quire.plan.cost_model import StepTime
from quire.sim.cluster import Cluster
from quire.sim.faults import Add, Fault, Kill, Slow
from quire.sim.replica import ClusterConfig, Point
from quire.sim.scaling import Scaler, Scaling
from quire.workload.request import Workload


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The work of one replica. A replica that died and its replacement are two."""

    number: int
    num_steps: int
    busy_s: float  # computing steps
    stats: EngineStats  # at the end


@dataclass(frozen=True, slots=True)
class Simulated:
    """The result of a simulation."""

    records: tuple[RequestRecord, ...]  # by index
    points: tuple[Point, ...]
    replicas: tuple[ReplicaReport, ...]  # those that died first, then by number
    end_s: float  # virtual time
    replica_hours: float = 0.0  # rented, up to the end of the last request
    peak_replicas: int = 0

    @property
    def num_steps(self) -> int:
        """Steps planned by the scheduler and computed, over all replicas."""
        return sum(replica.num_steps for replica in self.replicas)

    @property
    def kv_peak(self) -> float:
        """The largest share of its blocks that a replica held at any time."""
        return max(replica.stats.num_peak_blocks / replica.stats.num_blocks for replica in self.replicas)


def simulate(
    config: ClusterConfig,
    step_time: StepTime,
    workload: Workload,
    *,
    watch: Callable[[Executor], Executor] | None = None,
    scaling: Scaling | None = None,
) -> Simulated:
    """Run ``workload`` through ``config``'s replicas. The same arguments give the same result bit for bit.

    ``watch`` wraps the executor of every replica; ``scaling`` lets their number follow the load.

    Raises:
        ConfigError: requests remain that no replica will ever take: all died, and none restarts.
    """
    cluster = Cluster(config, step_time, workload, watch=watch)
    for fault in config.faults:
        schedule(fault, cluster)
    scaler = None if scaling is None else Scaler(cluster, *scaling, len(workload.requests))
    with _no_collector():
        cluster.run()
    replicas = [*cluster.retired, *cluster.replicas]
    last_s = max((record.end_s for record in cluster.client.records), default=0.0)
    return Simulated(
        records=tuple(sorted(cluster.client.records, key=lambda record: record.index)),
        points=tuple(cluster.timeline.points),
        replicas=tuple(
            ReplicaReport(r.number, r.executor.num_steps, r.executor.busy_s, r.stats()) for r in replicas
        ),
        end_s=cluster.clock.now(),
        replica_hours=(len(cluster.replicas) * last_s if scaler is None else scaler.close(last_s)) / 3600,
        peak_replicas=len(cluster.replicas) if scaler is None else scaler.peak,
    )


@contextmanager
def _no_collector() -> Iterator[None]:
    """Postpone the collection of reference cycles to the end: looking for them takes a fifth of a run's time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def schedule(fault: Fault, cluster: Cluster) -> None:
    """Schedule ``fault`` at its time."""
    match fault:
        case Kill():
            cluster.at(fault.at, lambda: _kill(fault, cluster))
        case Slow():
            cluster.at(fault.at, lambda: _slow(fault, cluster))
        case Add():
            cluster.at(fault.at, lambda: _add(fault, cluster))


def _kill(fault: Kill, cluster: Cluster) -> None:
    if fault.replica >= len(cluster.replicas):  # still starting
        return
    cluster.kill(fault.replica)
    if fault.restart:
        _start_later(cluster, lambda: cluster.start(fault.replica))


def _slow(fault: Slow, cluster: Cluster) -> None:
    if fault.replica >= len(cluster.replicas):
        return
    executor = cluster.replicas[fault.replica].executor
    executor.slowdown *= fault.factor

    def recover() -> None:
        executor.slowdown /= fault.factor

    cluster.at(fault.until, recover)


def _add(fault: Add, cluster: Cluster) -> None:
    for _ in range(fault.count):
        _start_later(cluster, lambda: cluster.start(len(cluster.replicas)))


def _start_later(cluster: Cluster, start: Callable[[], None]) -> None:
    cluster.at(cluster.clock.now() + cluster.config.start_up_s, start)
