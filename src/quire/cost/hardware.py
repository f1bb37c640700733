"""Devices as data: memory, bandwidth, dense arithmetic, links, price; from ``data/hardware.toml``, with sources.

This machine is a device too: `this_machine` measures its read bandwidth and the peak of its dot instructions
(csrc/cpu/probe.cpp).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from quire.config import DeviceInfo
from quire.errors import ConfigError, nearest
from quire.units import GIB

try:
    from quire import _native as native
except ImportError:  # no compiler at install
    native = None  # type: ignore[assignment]

HERE = "this machine"  # the name of `this_machine`
UNITS = ("bf16", "fp8", "int8", "fp4")
READ_BYTES = 1 << 30  # bytes read by the bandwidth probe
# Instruction set level → instructions that its kernels may multiply with; the fastest one of this CPU is the bound.
FLOAT_DOTS: dict[str, tuple[str, ...]] = {
    "amx": ("tdpbf16ps", "vdpbf16ps", "fma_avx512"),
    "avx512": ("vdpbf16ps", "fma_avx512"),
    "avx512_vnni": ("fma_avx512",),
    "avx512_bw": ("fma_avx512",),
    "avx2": ("fma_avx2",),
}
INT8_DOTS: dict[str, tuple[str, ...]] = {
    "amx": ("tdpbssd", "vpdpbusd"),
    "avx512": ("vpdpbusd",),
    "avx512_vnni": ("vpdpbusd",),
    "avx512_bw": ("fma_avx512",),
    "avx2": ("vpdpbusd_avx2", "fma_avx2"),
}


@dataclass(frozen=True, slots=True)
class Price:
    """USD per hour for one device."""

    usd: float
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of device. ``None``, or a missing unit: unknown, or the device has none."""

    name: str
    title: str
    source: str
    memory_bytes: int
    bandwidth: float  # bytes/s of the device's memory
    flops: Mapping[str, float]  # unit (`UNITS`) → dense operations/s
    kind: Literal["accelerator", "cpu"] = "accelerator"
    link: str = ""
    link_bandwidth: float | None = None  # bytes/s in one direction, between devices of a domain
    domain: int = 1  # devices that the link joins
    # bytes/s in one direction, between domains; for CPUs only where they are in several
    network_bandwidth: float | None = None
    sram_bytes: float | None = None  # shared memory and L1 of all processors
    sram_bandwidth: float | None = None  # bytes/s, of all together
    l2_bytes: float | None = None
    l2_bandwidth: float | None = None  # bytes/s read
    host_bandwidth: float | None = None  # bytes/s from the host's memory, in one direction
    price: Price | None = field(default=None)
    spot_usd: float | None = None  # per hour, interruptible
    purchase_usd: float | None = None  # an example: makers of datacenter devices list no prices
    watts: float | None = None  # at most, of the device alone

    def rate(self, precision: str) -> float | None:
        """Return the operations per second at which weights of ``precision`` are multiplied; None: unknown.

        A device without a unit for a precision expands the weights and multiplies in bf16.
        """
        wanted = {"fp8": "fp8", "int8": "int8", "fp4": "fp4"}.get(precision, "bf16")
        return self.flops.get(wanted) or self.flops.get("bf16")


@cache
def hardware_table() -> Mapping[str, Hardware]:
    """Return name → device, in the order of the file."""
    text = (files("quire.cost") / "data" / "hardware.toml").read_text()
    return {name: _read(name, row) for name, row in tomllib.loads(text).items()}


def find_hardware(name: str) -> Hardware:
    """Return the device ``name``; case and a vendor's prefix do not matter.

    Raises:
        ConfigError: names the value and the known devices.
    """
    table = hardware_table()
    key = name.strip().lower().replace("_", "-").removeprefix("nvidia-").removesuffix("-sxm")
    if key not in table:
        raise ConfigError(
            f"--gpu {name!r} is not in the hardware table{nearest(key, table)}; there are {', '.join(table)}"
        )
    return table[key]


def hardware_named(name: str) -> Hardware:
    """Return the device that its driver calls ``name``, as "NVIDIA H100 80GB HBM3".

    Raises:
        ConfigError: none of the table has such a name.
    """
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    table = hardware_table()
    known = [key for key in table if set(key.split("-")) <= words]
    if not known:
        raise ConfigError(
            f"the GPU of this machine, {name!r}, is not in the hardware table: name a device with --gpu (list shows "
            "all), or plan the CPU with --cpu"
        )
    return table[max(known, key=lambda key: key.count("-"))]


def _read(name: str, row: Mapping[str, Any]) -> Hardware:
    link, network = row.get("link_gb_s"), row.get("network_gb_s")
    return Hardware(
        name=name,
        title=row["title"],
        source=row["source"],
        memory_bytes=int(row["memory_gib"] * GIB),
        bandwidth=row["bandwidth_gb_s"] * 1e9,
        flops={unit: row[unit] * 1e12 for unit in UNITS if unit in row},
        kind=row.get("kind", "accelerator"),
        link=row.get("link", ""),
        link_bandwidth=link * 1e9 if link is not None else None,
        domain=row.get("domain", 1),
        network_bandwidth=network * 1e9 if network is not None else None,
        sram_bytes=_scaled(row, "sram_mib", 2**20),
        sram_bandwidth=_scaled(row, "sram_gb_s", 1e9),
        l2_bytes=_scaled(row, "l2_mib", 2**20),
        l2_bandwidth=_scaled(row, "l2_gb_s", 1e9),
        host_bandwidth=_scaled(row, "pcie_gb_s", 1e9),
        price=Price(**row["price"]) if "price" in row else None,
        spot_usd=row.get("spot_usd"),
        purchase_usd=row.get("purchase_usd"),
        watts=row.get("watts"),
    )


def _scaled(row: Mapping[str, Any], key: str, unit: float) -> float | None:
    return row[key] * unit if key in row else None


@dataclass(frozen=True, slots=True)
class Bounds:
    """``read``: bytes/s. ``dots``: operations/s by instruction; a multiply and an add are two operations."""

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
    """Measure the bounds on ``num_threads`` threads in about one second. Needs the native extension."""
    return Bounds(
        READ_BYTES / native.probe_read(num_threads, READ_BYTES, 3),
        {name: native.probe_dot(num_threads, name, 3) for name in native.dot_probes()},
    )


def this_machine(device: DeviceInfo, num_threads: int) -> Hardware:
    """Return the CPU as a device of the planner, measured now. Needs the native extension."""
    bounds = measure(num_threads)
    peaks = {"bf16": bounds.peak(device.isa, "float"), "int8": bounds.peak(device.isa, "int8")}
    return Hardware(
        name=HERE,
        title=f"{device.name}, {num_threads} cores",
        source=f"measured now: {bounds}",
        memory_bytes=device.memory_total_bytes,
        bandwidth=bounds.read,
        flops={unit: rate for unit, rate in peaks.items() if rate is not None},
        kind="cpu",
    )
