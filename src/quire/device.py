"""The machine: memory, instruction sets, and the first NVIDIA GPU. Read once at start-up, before `resolve`.

The GPU is found through the driver's own libraries, without torch and without creating a context: libcuda respects
CUDA_VISIBLE_DEVICES and reports capability and total memory; libnvidia-ml reports free memory.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.config import DeviceInfo
from quire.cores import num_physical_cores, numa_nodes
from quire.errors import ConfigError

try:
    from quire import _native
except ImportError:
    # Without a compiler at install the reference kernels run, and `quire doctor` says what to do.
    _native = None  # type: ignore[assignment]


def detect_device(wanted: str = "cpu") -> DeviceInfo:
    """Return where ``wanted`` (`EngineArgs.device`) runs. "auto" is a GPU that Quire can use, else the CPU.

    Raises:
        ConfigError: "cuda" without a usable GPU; the message says why.
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
    """Return the CPU as this process may use it, within affinity, cgroup limits and MemAvailable."""
    total, available = memory_bytes()
    return DeviceInfo(
        kind="cpu",
        name=cpu_name(),
        num_cores=num_physical_cores(),
        memory_total_bytes=total,
        memory_available_bytes=available,
        isa=_native.best_isa() if _native is not None else "scalar",
        native=_native is not None,
        num_nodes=len(numa_nodes()),
    )


def cpu_features() -> dict[str, bool]:
    """Return the instruction sets as the native extension sees them; empty without it."""
    return dict(_native.cpu_features()) if _native is not None else {}


# The features that each level of the kernels needs, fastest first, and what /proc/cpuinfo calls them.
LEVELS = {
    "amx": ("avx512", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"),
    "avx512": ("avx512", "avx512_vnni", "avx512_bf16"),
    "avx512_vnni": ("avx512", "avx512_vnni"),
    "avx512_bw": ("avx512",),
    "avx2": ("avx2",),
}
ARM_LEVELS = {"neon_i8mm": ("neon_dotprod", "neon_i8mm", "neon_bf16"), "neon": ("neon_dotprod",)}
_FLAGS = {"avx512": "avx512bw", "neon_dotprod": "asimddp", "neon_i8mm": "i8mm", "neon_bf16": "bf16"}


def unused_levels(
    features: Mapping[str, bool], best: str, is_built: Callable[[str], bool], flags: Set[str]
) -> list[str]:
    """Return why each level faster than ``best`` is not used.

    Args:
        features: what this process may use, of `cpu_features`.
        is_built: whether this build and CPU run a level.
        flags: those of /proc/cpuinfo; empty where unknown.
    """
    problems: list[str] = []
    for level, needed in (ARM_LEVELS if features.get("neon") else LEVELS).items():
        if level == best:
            break
        missing = [name for name in needed if not features.get(name)]
        hidden = [name for name in missing if _FLAGS.get(name, name) in flags]
        if hidden:
            what = f"the CPU has {', '.join(hidden)}, and the operating system does not let processes use it"
        elif missing:
            what = f"this CPU, or the virtual machine's view of it, has no {', '.join(missing)}"
        elif not is_built(level):
            what = "the CPU has all it needs, and this build has no such kernels: reinstall with a newer compiler"
        else:
            continue
        problems.append(f"{level} is not used: {what}.")
    return problems


def is_built(level: str) -> bool:
    """Return whether the native extension is there, and runs the level on this CPU."""
    return _native is not None and _native.has_isa(level)


def cpu_flags() -> set[str]:
    """Return the flags of the first CPU in /proc/cpuinfo; empty elsewhere than on Linux."""
    lines = (line for line in _read("/proc/cpuinfo").splitlines() if line.startswith(("flags", "Features")))
    return set(next(lines, "").partition(":")[2].split())


def slow_kernels(device: DeviceInfo, cpu_isa: str) -> str | None:
    """Return why the kernels of an engine at ``cpu_isa`` are slow on ``device``, and what to do; None: they are not."""
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
        if os.uname().machine in ("aarch64", "arm64"):
            missing, better = "byte dot products (Armv8.2 dotprod)", "Neoverse N1, Apple M1 or newer"
        else:
            missing, better = "AVX2", "a CPU with AVX2 or AVX-512"
        return f"This CPU has no {missing}, so the scalar kernels run: exact, and slow. Use {better}."
    if cpu_isa in ("reference", "scalar"):
        return f"--cpu-isa {cpu_isa} was asked for: exact, and slow. Without it the {device.isa} kernels run."
    return None


def cpu_name() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith(("model name", "Model", "Hardware")):
            return line.split(":", 1)[1].strip()
    return os.uname().machine


def memory_bytes() -> tuple[int, int]:
    """Return (total, available) bytes of the machine, or of the cgroup (v2 or v1) where those are fewer."""
    info = {}
    for line in _read("/proc/meminfo").splitlines():
        key, _, rest = line.partition(":")
        info[key] = int(rest.split()[0]) * 1024
    if "MemTotal" not in info:  # another system than Linux: what is available is guessed
        info["MemTotal"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    total, available = info["MemTotal"], info.get("MemAvailable", info["MemTotal"] // 2)
    for folder, limit_file, used_file in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit = _read(f"{folder}/{limit_file}").strip()
        if limit.isdigit() and int(limit) < total:
            used = int(_read(f"{folder}/{used_file}").strip() or 0) - _reclaimable(
                _read(f"{folder}/memory.stat")
            )
            total = int(limit)
            available = min(available, max(0, int(limit) - used))
    return total, available


def _reclaimable(stat: str) -> int:
    """Return the bytes of page cache, which a cgroup counts as used but frees under pressure."""
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


LEAST_CAPABILITY = (8, 0)  # Ampere: bf16 products
FP8_CAPABILITY = (8, 9)  # Ada and Hopper: fp8 conversions and products
LEAST_DRIVER = 12_000  # CUDA 12.0: torch ≥ 2.11 is built for no older version
_MAJOR, _MINOR = 75, 76  # CUdevice_attribute

Load = Callable[[str], Any]  # `ctypes.CDLL`, or a test's replacement; raises OSError


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """``driver``: the newest CUDA that the driver runs, 1000 · major + 10 · minor."""

    name: str
    capability: tuple[int, int]
    driver: int
    memory_total_bytes: int
    memory_available_bytes: int


def find_gpu(load: Load = ctypes.CDLL) -> GpuInfo | str:
    """Return the first visible GPU, or a sentence that says why there is none."""
    try:
        cuda = load("libcuda.so.1")
    except OSError:
        return "No NVIDIA driver is installed (libcuda.so.1 is not there)."
    status = int(cuda.cuInit(0))
    if status:
        return f"The NVIDIA driver finds no usable GPU (cuInit gave {status}); nvidia-smi may say more."
    count = _integer(cuda.cuDeviceGetCount)
    if count == 0:
        return "The NVIDIA driver is there and shows no GPU; CUDA_VISIBLE_DEVICES may hide it."
    device = ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    name = ctypes.create_string_buffer(128)
    cuda.cuDeviceGetName(name, len(name), device)
    total = ctypes.c_size_t()
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)

    def attribute(number: int) -> int:
        return _integer(cuda.cuDeviceGetAttribute, number, device)

    return GpuInfo(
        name=name.value.decode(errors="replace"),
        capability=(attribute(_MAJOR), attribute(_MINOR)),
        driver=_integer(cuda.cuDriverGetVersion),
        memory_total_bytes=total.value,
        memory_available_bytes=_free_bytes(cuda, device, load, total.value),
    )


def gpu_problem(gpu: GpuInfo) -> str | None:
    """Return why Quire cannot run on ``gpu``, with its figures and the required ones; None: it can."""
    if gpu.driver < LEAST_DRIVER:
        return (
            f"{gpu.name}: the driver runs CUDA up to {_version(gpu.driver)}, and {_version(LEAST_DRIVER)} is needed: "
            "update the NVIDIA driver."
        )
    if gpu.capability < LEAST_CAPABILITY:
        have, need = (".".join(map(str, version)) for version in (gpu.capability, LEAST_CAPABILITY))
        return f"{gpu.name} has compute capability {have}; {need} or more is needed (Ampere and later)."
    return None


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _integer(function: Any, *arguments: Any) -> int:
    value = ctypes.c_int()
    function(ctypes.byref(value), *arguments)
    return value.value


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _free_bytes(cuda: Any, device: ctypes.c_int, load: Load, total: int) -> int:
    """Return the free bytes of the device, or ``total`` where the management library does not report them."""
    bus = ctypes.create_string_buffer(32)
    cuda.cuDeviceGetPCIBusId(bus, len(bus), device)
    try:
        nvml = load("libnvidia-ml.so.1")
    except OSError:
        return total
    handle, memory = ctypes.c_void_p(), _Memory()
    if (
        nvml.nvmlInit_v2()
        or nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(handle))
        or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    ):
        return total
    return int(memory.free)
