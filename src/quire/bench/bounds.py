"""What the machine gives right now: read bandwidth and the peak of its dot instructions (csrc/cpu/probe.cpp)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.config import DeviceInfo
from quire.plan.hardware import Hardware

try:
    from quire import _native as native
except ImportError:  # no compiler at install
    native = None  # type: ignore[assignment]

READ_BYTES = 1 << 30
# Level → instructions that its kernels may multiply with; the fastest one that the CPU has is the bound.
FLOAT_DOTS: dict[str, tuple[str, ...]] = {
    "amx": ("tdpbf16ps", "vdpbf16ps", "fma_avx512"),
    "avx512": ("vdpbf16ps", "fma_avx512"),
    "avx2": ("fma_avx2",),
}
INT8_DOTS: dict[str, tuple[str, ...]] = {
    "amx": ("tdpbssd", "vpdpbusd"),
    "avx512": ("vpdpbusd",),
    "avx2": ("vpdpbusd_avx2", "fma_avx2"),
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """``read``: bytes a second. ``dots``: operations a second (a multiply and an add are two) by instruction."""

    read: float
    dots: dict[str, float]

    def peak(self, isa: str, unit: Literal["float", "int8"]) -> float | None:
        """Return the peak of a level's fastest dot instruction; None where none is measured (scalar)."""
        names = (FLOAT_DOTS if unit == "float" else INT8_DOTS).get(isa, ())
        return max((self.dots[name] for name in names if name in self.dots), default=None)

    def __str__(self) -> str:
        dots = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in self.dots.items())
        return f"read {self.read / 1e9:.1f} GB/s; Gop/s: {dots or 'not measured on this CPU'}"


def measure(num_threads: int) -> Bounds:
    """Take about a second to measure the bounds on ``num_threads`` threads. Needs the native extension."""
    return Bounds(
        READ_BYTES / native.probe_read(num_threads, READ_BYTES, 3),
        {name: native.probe_dot(num_threads, name, 3) for name in native.dot_probes()},
    )


def this_machine(device: DeviceInfo, num_threads: int) -> Hardware:
    """Return the CPU as a device of the planner, measured now. Needs the native extension."""
    bounds = measure(num_threads)
    peaks = {"bf16": bounds.peak(device.isa, "float"), "int8": bounds.peak(device.isa, "int8")}
    return Hardware(
        name="this machine",
        title=f"{device.name}, {num_threads} cores",
        source=f"measured now: {bounds}",
        memory_bytes=device.memory_total_bytes,
        bandwidth=bounds.read,
        flops={unit: rate for unit, rate in peaks.items() if rate is not None},
        kind="cpu",
    )


def mean(before: Bounds, after: Bounds) -> Bounds:
    return Bounds(
        (before.read + after.read) / 2,
        {name: (rate + after.dots[name]) / 2 for name, rate in before.dots.items()},
    )
