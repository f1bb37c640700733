"""The first NVIDIA GPU, asked through the driver's own libraries: no torch, and no context is made on it.

libcuda heeds CUDA_VISIBLE_DEVICES and knows capability and total memory; libnvidia-ml knows what is free.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LEAST_CAPABILITY = (8, 0)  # Ampere: bf16 products
FP8_CAPABILITY = (8, 9)  # Ada and Hopper: fp8 conversions and products
LEAST_DRIVER = 12_000  # CUDA 12.0, the oldest major version that torch ≥ 2.11 is built for
_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76  # CUdevice_attribute

Load = Callable[[str], Any]  # `ctypes.CDLL`, or what a test puts in its place; raises OSError


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """``driver``: the newest CUDA that the driver runs, 1000 · major + 10 · minor."""

    name: str
    capability: tuple[int, int]
    driver: int
    memory_total_bytes: int
    memory_available_bytes: int
    multiprocessors: int


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
        multiprocessors=attribute(_MULTIPROCESSORS),
    )


def gpu_problem(gpu: GpuInfo) -> str | None:
    """Say why Quire cannot run on ``gpu``, with what it has and what is needed; None: it can."""
    if gpu.driver < LEAST_DRIVER:
        return (
            f"{gpu.name}: the driver runs CUDA up to {_version(gpu.driver)}, and {_version(LEAST_DRIVER)} is needed: "
            "update the NVIDIA driver."
        )
    if gpu.capability < LEAST_CAPABILITY:
        have, need = (".".join(map(str, each)) for each in (gpu.capability, LEAST_CAPABILITY))
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
    """Return the free bytes of the device; all of it where the management library does not tell."""
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
