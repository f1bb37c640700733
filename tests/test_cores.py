"""Which CPUs the threads of an engine take, on machines whose description in /sys and /proc the tests write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire import cores

QUOTAS = Path("/sys/fs/cgroup/cpu")


def machine(
    monkeypatch: pytest.MonkeyPatch, *, siblings: dict[int, str], speeds: dict[int, int] | None = None,
    files: dict[str, str] | None = None,
) -> None:  # fmt: skip
    """Describe a machine whose CPU ``c`` lies on the core ``siblings[c]``."""
    found = {f"{cores.CPUS}/cpu{cpu}/topology/thread_siblings_list": text for cpu, text in siblings.items()}
    found |= {
        f"{cores.CPUS}/cpu{cpu}/cpufreq/cpuinfo_max_freq": f"{s}\n" for cpu, s in (speeds or {}).items()
    }
    found |= files or {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(siblings))
    monkeypatch.setattr(cores, "_read", lambda path: found.get(path, ""))


ADJACENT = {cpu: f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" for cpu in range(8)}  # as many clouds number them
APART = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
# Two fast cores of two threads each, four slow ones of one.
HYBRID = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", 4: "4", 5: "5", 6: "6", 7: "7"}
HYBRID_SPEEDS = {cpu: 5_000_000 if cpu < 4 else 3_600_000 for cpu in HYBRID}


def test_threads_take_a_core_each_before_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, siblings=ADJACENT)
    assert cores.num_physical_cores() == 4
    assert cores.thread_cpus() == [0, 2, 4, 6, 1, 3, 5, 7]
    machine(monkeypatch, siblings=APART)
    assert cores.thread_cpus() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_threads_take_the_fast_cores_of_a_hybrid_first(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, siblings=HYBRID, speeds=HYBRID_SPEEDS)
    assert cores.num_physical_cores() == 6
    assert cores.thread_cpus() == [0, 2, 4, 5, 6, 7, 1, 3]
    masked = {cpu: siblings for cpu, siblings in HYBRID.items() if cpu in (1, 4, 5)}
    machine(monkeypatch, siblings=masked, speeds=HYBRID_SPEEDS)
    assert cores.thread_cpus() == [1, 4, 5]


@pytest.mark.parametrize(
    ("siblings", "num", "groups"),
    [
        (ADJACENT, 2, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (APART, 2, [{0, 1, 4, 5}, {2, 3, 6, 7}]),
        (APART, 3, [{0, 4}, {1, 5}, {2, 3, 6, 7}]),
        ({2: "2", 5: "5", 7: "7"}, 2, [{2}, {5, 7}]),
        ({0: "0-1", 1: "0-1"}, 2, [{0}, {1}]),
        ({4: "4"}, 3, [{4}, {4}, {4}]),
    ],
)
def test_groups_get_whole_cores(
    monkeypatch: pytest.MonkeyPatch, siblings: dict[int, str], num: int, groups: list[set[int]]
) -> None:
    machine(monkeypatch, siblings=siblings)
    assert cores.core_groups(num) == groups


def test_groups_of_a_hybrid_are_equally_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, siblings=HYBRID, speeds=HYBRID_SPEEDS)
    assert cores.core_groups(2) == [{0, 1, 4, 5}, {2, 3, 6, 7}]


def test_the_least_quota_of_all_levels_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/self/cgroup": "0::/system.slice/quire.service\n"}
    machine(monkeypatch, siblings=APART, files=files)
    assert cores.cgroup_quota() is None
    root = "/sys/fs/cgroup"
    files[f"{root}/system.slice/cpu.max"] = "250000 100000\n"
    files[f"{root}/system.slice/quire.service/cpu.max"] = "max 100000\n"
    machine(monkeypatch, siblings=APART, files=files)
    assert (cores.cgroup_quota(), cores.num_physical_cores()) == (2.5, 2)
    files[f"{root}/system.slice/quire.service/cpu.max"] = "350000 100000\n"
    machine(monkeypatch, siblings=APART, files=files)
    assert (cores.cgroup_quota(), cores.num_physical_cores()) == (2.5, 2)
    old = {"/proc/self/cgroup": "3:cpu,cpuacct:/docker/ab\n0::/\n", f"{root}/cpu/cpu.cfs_quota_us": "50000\n",
           f"{root}/cpu/cpu.cfs_period_us": "100000\n"}  # fmt: skip
    machine(monkeypatch, siblings=APART, files=old)
    assert (cores.cgroup_quota(), cores.num_physical_cores()) == (0.5, 1)


def test_a_quota_is_told_by_the_name_of_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, group, files in (
        ("cpu.max", "0::/", {"cpu.max": "150000 100000"}),
        (
            "cpu.cfs_quota_us",
            "3:cpu:/",
            {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000"},
        ),
    ):
        files = {f"/sys/fs/cgroup/{path}": text for path, text in files.items()}
        machine(monkeypatch, siblings=APART, files={"/proc/self/cgroup": f"{group}\n", **files})
        monkeypatch.setattr(os, "cpu_count", lambda: 8)
        assert cores.withheld_cores() == f"The cgroup's quota ({name}) leaves 1.5 of 8 CPUs."
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert cores.withheld_cores() is None


GENERATE = """
import hashlib, json, os, sys
from quire import LLM, SamplingParams
from quire.cores import cgroup_quota
llm = LLM("quill", threads=int(sys.argv[1]), seed=3)
prompts = ["It was a dark and", "The " * 200, "Once"]
outputs = llm.generate(prompts, SamplingParams(temperature=0.9, seed=5, max_tokens=12, logprobs=1))
found = [(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in outputs]
print(json.dumps([hashlib.sha256(repr(found).encode()).hexdigest(), cgroup_quota()]))
"""


def generate(
    num_threads: int, *, quotas: Path | None = None, cpus: set[int] | None = None
) -> tuple[str, float | None]:
    """Return the hash of tokens and log-probabilities of a process with these threads, and the quota that it saw."""

    def enter() -> None:
        if quotas is not None:
            (quotas / "cgroup.procs").write_text(str(os.getpid()))
        if cpus is not None:
            os.sched_setaffinity(0, cpus)

    command = [sys.executable, "-c", GENERATE, str(num_threads)]
    done = subprocess.run(command, preexec_fn=enter, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    digest, quota = json.loads(done.stdout.splitlines()[-1])
    return digest, quota


@contextmanager
def quota_of(share: float) -> Iterator[Path]:
    """Make a cgroup with this share of one CPU, of whichever version is mounted; skip without the right to."""
    folder = (QUOTAS if QUOTAS.is_dir() else QUOTAS.parent) / f"quire-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        if (folder / "cpu.cfs_quota_us").exists():
            (folder / "cpu.cfs_quota_us").write_text(str(int(share * 100_000)))
        elif (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text(f"{int(share * 100_000)} 100000")
        else:
            pytest.skip("this cgroup has no CPU controller")
        yield folder
    finally:
        folder.rmdir()


@pytest.mark.slow
def test_a_quota_and_an_affinity_change_no_bit() -> None:
    """One and a half CPUs' time, or one CPU, for two, three and seven threads."""
    expected, _ = generate(1)
    with quota_of(1.5) as folder:
        for num_threads in (2, 3, 7):
            assert generate(num_threads, quotas=folder) == (expected, 1.5)
    for num_threads in (2, 3, 7):
        assert generate(num_threads, cpus={min(cores.usable_cpus())})[0] == expected


PINNED = """
import os, sys, torch
from quire import _native
from quire.kernels.threads import choose_threads
from quire.cores import usable_cpus
cpus = sorted(usable_cpus())[:2]
_native.place_threads(cpus[::-1])
before = set(os.listdir("/proc/self/task"))
_native.probe_read(2, 1 << 20, 1)
(worker,) = set(os.listdir("/proc/self/task")) - before
assert os.sched_getaffinity(int(worker)) == {cpus[0]}, (os.sched_getaffinity(int(worker)), cpus)
"""


@pytest.mark.skipif(len(cores.usable_cpus()) < 2, reason="one CPU")
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="not Linux")
def test_workers_are_pinned_in_the_order_given() -> None:
    pytest.importorskip("quire._native")
    done = subprocess.run([sys.executable, "-c", PINNED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
