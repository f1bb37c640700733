"""The CPUs that this process may use: which of them share a core, which are fast, and what a cgroup leaves of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

CPUS = "/sys/devices/system/cpu"
NODES = "/sys/devices/system/node"
CGROUPS = "/sys/fs/cgroup"


def usable_cpus() -> set[int]:
    """Return the CPUs that this process may run on. Only Linux says which; elsewhere all are assumed."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core. ``speed``: its capacity or highest frequency, comparable within one machine; 0: unknown."""

    cpus: tuple[int, ...]  # the usable ones, ascending
    speed: int
    node: int


def cores() -> list[Core]:
    """Return the physical cores that this process may run on, the fast ones first, then by memory node."""
    allowed = usable_cpus()
    nodes = {cpu: number for number, node in enumerate(numa_nodes()) for cpu in node}
    groups: dict[str, list[int]] = {}
    for cpu in sorted(allowed):
        groups.setdefault(_read(f"{CPUS}/cpu{cpu}/topology/thread_siblings_list") or str(cpu), []).append(cpu)
    physical = [Core(tuple(cpus), _speed(cpus[0]), nodes.get(cpus[0], 0)) for cpus in groups.values()]
    return sorted(physical, key=lambda core: (-core.speed, core.node, core.cpus))


def _speed(cpu: int) -> int:
    """Return what the kernel says of a hybrid machine: Arm gives capacities, x86 frequencies in kHz."""
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        text = _read(f"{CPUS}/cpu{cpu}/{name}").strip()
        if text.isdigit():
            return int(text)
    return 0


def thread_cpus() -> list[int]:
    """Return the usable CPUs in the order in which threads should take them.

    One of each physical core first, the fast cores before the slow ones: two threads on one core share its units, and
    on many virtual machines CPU 0 and CPU 1 are one core.
    """
    physical = cores()
    most = max(len(core.cpus) for core in physical)
    return [core.cpus[i] for i in range(most) for core in physical if i < len(core.cpus)]


def num_physical_cores() -> int:
    """Count the physical cores that this process may run on, at most the cgroup's quota."""
    count, quota = len(cores()), cgroup_quota()
    return count if quota is None else max(1, min(count, int(quota)))


def cgroup_quota() -> float | None:
    """Return how many CPUs' time the cgroups of this process leave it, the least of all levels; None: no limit."""
    return min((cpus for cpus, _ in _quotas()), default=None)


def _quotas() -> Iterator[tuple[float, str]]:
    """Yield the limit of each level that has one, in CPUs, and the name of its file, which differs by version."""
    for folder in _cgroup_folders():
        name = "cpu.max"
        quota, _, period = _read(f"{folder}/{name}").partition(" ")
        if not quota:
            name = "cpu.cfs_quota_us"
            quota, period = _read(f"{folder}/{name}"), _read(f"{folder}/cpu.cfs_period_us")
        if quota.strip().isdigit() and period.strip().isdigit():
            yield int(quota) / int(period), name


def _cgroup_folders() -> Iterator[str]:
    """Yield the folders of this process's CPU controller, of version 2 and 1, from its own up to the root.

    In a container /proc names a path of the host that is not mounted; its limit is at the root.
    """
    for line in _read("/proc/self/cgroup").splitlines() or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots = [CGROUPS, f"{CGROUPS}/unified"]
        elif "cpu" in controllers.split(","):
            roots = [f"{CGROUPS}/cpu", f"{CGROUPS}/{controllers}"]
        else:
            continue
        for root in roots:
            for part in (Path(path), *Path(path).parents):
                yield f"{root}{part}".rstrip("/")


def withheld_cores() -> str | None:
    """Return why this process has fewer cores than the machine; None: it has all."""
    allowed, present = len(usable_cpus()), os.cpu_count() or 1
    if allowed < present:
        return f"The affinity of this process (taskset, a container) leaves {allowed} of {present} CPUs."
    for quota, name in sorted(_quotas())[:1]:
        return (
            f"The cgroup's quota ({name}) leaves {quota:.1f} of {present} CPUs." if quota < present else None
        )
    return None


def core_groups(num: int) -> list[set[int]]:
    """Share the usable CPUs out in ``num`` groups of neighbours: whole cores, of each speed the same number.

    With fewer cores than groups, CPUs are shared out; with fewer of those, too, some groups have one together.
    """
    physical, groups = cores(), [set[int]() for _ in range(num)]
    if len(physical) < num:
        cpus = sorted(usable_cpus())
        physical = [Core((cpus[index * len(cpus) // num],), 0, 0) for index in range(num)]
    for speed in sorted({core.speed for core in physical}):
        alike = [core for core in physical if core.speed == speed]
        ends = [len(alike) * index // num for index in range(num + 1)]
        for group, (start, end) in zip(groups, pairwise(ends), strict=True):
            group.update(cpu for core in alike[start:end] for cpu in core.cpus)
    return groups


def numa_nodes() -> list[set[int]]:
    """Return the CPUs that this process may use of each memory node that has any; one set where nothing is known."""
    allowed, nodes = usable_cpus(), []
    for folder in sorted(Path(NODES).glob("node[0-9]*"), key=lambda p: int(p.name[4:])):
        cpus: set[int] = set()
        for part in filter(None, _read(str(folder / "cpulist")).strip().split(",")):
            first, _, last = part.partition("-")
            cpus |= set(range(int(first), int(last or first) + 1))
        nodes += [cpus & allowed] if cpus & allowed else []
    return nodes or [set(allowed)]


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
