"""`simulate`: run a workload through a cluster, with its faults, from start to end; the summary, plots and page."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quire.cost.cost_model import StepTime
from quire.errors import ConfigError
from quire.executor.base import Executor
from quire.metrics.engine_stats import EngineStats
from quire.slo import Slo
from quire_lab.bench.figures import Series, chart
from quire_lab.bench.page import Section, html_page
from quire_lab.bench.summary import RequestRecord, summarize
from quire_lab.sim.cluster import Cluster
from quire_lab.sim.disaggregated import Transferred
from quire_lab.sim.replica import Add, ClusterConfig, Fault, Kill, Point, Slow
from quire_lab.sim.scaling import Scaler, Scaling
from quire_lab.workload.request import Workload


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The work of one replica. A replica that died and its replacement are two."""

    number: int
    num_steps: int
    busy_s: float  # computing steps
    stats: EngineStats  # at the end
    bubbles: float = 0.0  # share of stages' time spent waiting with a step in flight


@dataclass(frozen=True, slots=True)
class Simulated:
    """The result of a simulation."""

    records: tuple[RequestRecord, ...]  # in the order of index
    points: tuple[Point, ...]
    replicas: tuple[ReplicaReport, ...]  # those that died first, then by number
    end_s: float  # virtual time
    transferred: Transferred | None = None  # between pools
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
            ReplicaReport(r.number, r.executor.num_steps, r.executor.busy_s, r.stats(), r.executor.bubbles)
            for r in replicas
        ),
        end_s=cluster.clock.now(),
        transferred=None if cluster.handover is None else cluster.handover.total,
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


def summary_of(result: Simulated, slo: Slo | None, workload: Workload) -> dict[str, Any]:
    """Return the summary of `quire bench serve`, plus the simulator's own figures under ``simulation``."""
    summary = summarize(result.records, slo=slo, refused_rows=workload.refused)
    replicas = [
        {
            "replica": r.number,
            "steps": r.num_steps,
            "busy_s": r.busy_s,
            "bubbles": r.bubbles,
            "kv_peak": r.stats.num_peak_blocks / r.stats.num_blocks,
            "preemptions": r.stats.num_preemptions,
            "cached_tokens": r.stats.num_cached_tokens,
        }
        for r in result.replicas
    ]
    steps = {
        "num_steps": result.num_steps,
        "kv_peak": result.kv_peak,
        "end_s": result.end_s,
        "bubbles": sum(r.bubbles for r in result.replicas) / len(result.replicas),
        "attainment": summary["num_good"] / max(1, summary["num_requests"]),
        "replica_hours": result.replica_hours,
        "peak_replicas": result.peak_replicas,
        "replicas": replicas,
    }
    if result.transferred is not None:
        steps["transferred"] = asdict(result.transferred)
    return summary | {"simulation": steps}


def timeline_charts(points: Sequence[Point]) -> list[str]:
    """Return plots of the sequences in the engines and the blocks in use over time, as the schedulers see them."""
    times = [p.time_s for p in points]
    levels = [
        Series("running", times, [float(p.num_running) for p in points], "steps"),
        Series("waiting", times, [float(p.num_waiting) for p in points], "steps"),
    ]
    usage = [Series("", times, [100.0 * p.kv_usage for p in points], "steps")]
    return [
        chart(levels, title="Sequences in the engines", x="s", y="sequences"),
        chart(usage, title="KV blocks in use", x="s", y="%"),
    ]


def read_sweep(path: str) -> list[Mapping[str, Any]]:
    """Return the points of the JSON that ``--sweep --json`` of `quire bench serve` or `quire simulate` wrote."""
    try:
        points = json.loads(Path(path).read_text())["sweep"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not the JSON of a --sweep: {error!r}") from error
    return ordered(points)


def ordered(points: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the points by offered load."""
    return sorted(points, key=lambda p: float(p["offered_per_s"]))


def both_sweeps(measured: Sequence[Mapping[str, Any]], simulated: Sequence[Mapping[str, Any]]) -> str:
    """Return a page with goodput and latency of two sweeps over the same axes."""

    def line(name: str, points: Sequence[Mapping[str, Any]], key: str, part: str | None = None) -> Series:
        values = [(p["offered_per_s"], p[key] if part is None else p[key][part]) for p in ordered(points)]
        known = [(x, y) for x, y in values if y is not None]
        style = "points" if name == "measured" else "line"
        return Series(name, [x for x, _ in known], [y for _, y in known], style)

    def both(key: str, part: str | None = None) -> list[Series]:
        return [line("measured", measured, key, part), line("simulated", simulated, key, part)]

    x = "offered requests/s"
    plots = [
        chart(both("goodput_per_s"), title="Goodput", x=x, y="requests/s"),
        chart(both("output_tokens_per_s"), title="Output", x=x, y="tokens/s"),
    ]
    plots += [
        chart(both(key, part), title=f"{name} {part}", x=x, y="ms", log_y=True)
        for key, name in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"))
        for part in ("p50", "p95")
    ]
    return html_page("Measured and simulated", [Section(plots=plots)])
