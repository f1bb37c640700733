"""Devices as data: memory, bandwidth, dense arithmetic, links, price; from ``data/hardware.toml``, with sources."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from quire.errors import ConfigError, nearest

UNITS = ("bf16", "fp8", "int8", "fp4")
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Price:
    """USD an hour for one device."""

    usd: float
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of device. ``None``, or a unit that is missing: unknown, or it has none."""

    name: str
    title: str
    source: str
    memory_bytes: int
    bandwidth: float  # bytes a second, of the device's memory
    flops: Mapping[str, float]  # unit (`UNITS`) → dense operations a second
    kind: Literal["accelerator", "cpu"] = "accelerator"
    link: str = ""
    link_bandwidth: float | None = None  # bytes a second, one direction, between devices of a domain
    domain: int = 1  # devices that the link joins
    network_bandwidth: float | None = None  # bytes a second, one direction, between domains
    price: Price | None = field(default=None)

    def rate(self, precision: str) -> float | None:
        """Return the operations a second that weights of ``precision`` are multiplied at; None: unknown.

        A device without a unit for a precision expands the weights and multiplies in bf16.
        """
        wanted = {"fp8": "fp8", "int8": "int8", "fp4": "fp4"}.get(precision, "bf16")
        return self.flops.get(wanted) or self.flops.get("bf16")


@cache
def hardware_table() -> Mapping[str, Hardware]:
    """Return name → device, in the order of the file."""
    text = (files("quire.plan") / "data" / "hardware.toml").read_text()
    return {name: _read(name, row) for name, row in tomllib.loads(text).items()}


def find_hardware(name: str) -> Hardware:
    """Return the device ``name``; case and a vendor's prefix do not matter.

    Raises:
        ConfigError: names the value and what there is.
    """
    table = hardware_table()
    key = name.strip().lower().replace("_", "-").removeprefix("nvidia-").removesuffix("-sxm")
    if key not in table:
        raise ConfigError(
            f"--gpu {name!r} is not in the hardware table{nearest(key, table)}; there are {', '.join(table)}"
        )
    return table[key]


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
        price=Price(**row["price"]) if "price" in row else None,
    )
