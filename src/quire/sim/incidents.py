"""What a fault does to a cluster when its time comes."""

from __future__ import annotations

from collections.abc import Callable

from quire.sim.cluster import Cluster
from quire.sim.faults import Add, Fault, Kill, Slow


def schedule(fault: Fault, cluster: Cluster) -> None:
    """Let ``fault`` happen at its time."""
    match fault:
        case Kill():
            cluster.at(fault.at, lambda: _kill(fault, cluster))
        case Slow():
            cluster.at(fault.at, lambda: _slow(fault, cluster))
        case Add():
            cluster.at(fault.at, lambda: _add(fault, cluster))


def _kill(fault: Kill, cluster: Cluster) -> None:
    if fault.replica >= len(cluster.replicas):  # still starting: nothing runs that could die
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
