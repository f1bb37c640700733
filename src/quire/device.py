"""What this machine offers: cores, memory, instruction sets. Read once at start-up, before `resolve`."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from quire.config import DeviceInfo
from quire.errors import ConfigError
from quire.gpu import find_gpu, gpu_problem

try:
    from quire import _native
except ImportError:  # no compiler at install: the reference kernels run, and `quire doctor` says what to do
    _native = None  # type: ignore[assignment]


def detect_device(wanted: str = "cpu") -> DeviceInfo:
    """Return where ``wanted`` (`EngineArgs.device`) runs. "auto" is a GPU that Quire can use, else the CPU.

    Raises:
        ConfigError: "cuda" without a GPU that can be used, and why.
    """
    if wanted in ("auto", "cuda"):
        gpu = find_gpu()
        problem = gpu if isinstance(gpu, str) else gpu_problem(gpu)
        if problem is None and not isinstance(gpu, str):
            return DeviceInfo(
                "cuda", gpu.name, num_physical_cores(), gpu.memory_total_bytes, gpu.memory_available_bytes,
                capability=gpu.capability,
            )  # fmt: skip
        if wanted == "cuda":
            raise ConfigError(
                f"device = 'cuda' cannot be used: {problem} device = 'cpu' runs on this machine's CPU."
            )
    cpu = _cpu()
    if wanted == "interpret":
        return replace(cpu, kind="interpret", isa="scalar", native=False, capability=(9, 0))
    return cpu


def _cpu() -> DeviceInfo:
    """The CPU as this process may use it: affinity, cgroup limits and MemAvailable respected."""
    total, available = memory_bytes()
    return DeviceInfo(
        kind="cpu",
        name=cpu_name(),
        num_cores=num_physical_cores(),
        memory_total_bytes=total,
        memory_available_bytes=available,
        isa=_native.best_isa() if _native is not None else "scalar",
        native=_native is not None,
    )


def cpu_features() -> dict[str, bool]:
    """Return the native extension's view of the instruction sets, empty without it."""
    return dict(_native.cpu_features()) if _native is not None else {}


def slow_kernels(device: DeviceInfo, cpu_isa: str) -> str | None:
    """Say why the kernels of an engine at ``cpu_isa`` are slow on ``device``, and what to do; None: they are not."""
    if device.kind == "cuda":
        return None
    if device.kind == "interpret":
        return "--device interpret was asked for: every kernel runs in Triton's interpreter, thousands of times slower."
    if not device.native:
        compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
        if compiler is None:
            remedy = "no C++ compiler was found: install one (Debian: apt install g++) and reinstall Quire"
        else:
            remedy = (
                f"{compiler} is here: reinstall Quire (pip install -v . shows what failed; Debian's python3-dev has "
                "the headers)"
            )
        return f"The native extension is not built, so the torch reference runs: exact, and slow. {remedy}."
    if device.isa == "scalar":
        return "This CPU has no AVX2, so the scalar kernels run: exact, and slow. Take a CPU with AVX2 or AVX-512."
    if cpu_isa in ("reference", "scalar"):
        return f"--cpu-isa {cpu_isa} was asked for: exact, and slow. Without it the {device.isa} kernels run."
    return None


def cpu_name() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith(("model name", "Model", "Hardware")):
            return line.split(":", 1)[1].strip()
    return os.uname().machine


def num_physical_cores() -> int:
    """Count the cores that this process may run on, SMT siblings once, and no more than the cgroup's quota."""
    allowed = os.sched_getaffinity(0)
    siblings = {
        _read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)
        for cpu in allowed
    }
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    limit = len(siblings)
    if quota.isdigit() and period.strip().isdigit():
        limit = min(limit, max(1, int(quota) // int(period)))
    return max(1, limit)


def memory_bytes() -> tuple[int, int]:
    """Return (total, available) bytes: the machine's, or what the cgroup (v2 or v1) leaves where that is less."""
    info = {}
    for line in _read("/proc/meminfo").splitlines():
        key, _, rest = line.partition(":")
        info[key] = int(rest.split()[0]) * 1024
    total, available = info.get("MemTotal", 0), info.get("MemAvailable", 0)
    for limit_file, used_file, stat_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
            "/sys/fs/cgroup/memory/memory.stat",
        ),
    ):
        limit = _read(limit_file).strip()
        if limit.isdigit() and int(limit) < total:
            used = int(_read(used_file).strip() or 0) - _reclaimable(_read(stat_file))
            total = int(limit)
            available = min(available, max(0, int(limit) - used))
    return total, available


def _reclaimable(stat: str) -> int:
    """Page cache counts as used in a cgroup, but is given back under pressure."""
    for line in stat.splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
