"""How long the same bytes take from each memory of a device."""

from __future__ import annotations

from quire.cost.hardware import find_hardware
from quire.units import GIB
from quire_lab.learn.engine import DEVICES, MODELS, roofline
from quire_lab.learn.picture import Axis, Bars, Fact, Facts, Picture, Table
from quire_lab.learn.simulation import Simulation, choice, number
from quire_lab.plan.laws import tiers, transfer_s


def draw(device: str, gigabytes: float, model: str, precision: str) -> Picture:
    """Return a bar per memory, for ``gigabytes`` · 10⁹ bytes and for the weights of a model."""
    hardware = find_hardware(device)
    known = tiers(hardware)
    seconds = [transfer_s(gigabytes * 1e9, tier.bandwidth) for tier in known]
    shard = roofline(model, device, precision, ideal=True).work.shard
    weights = shard.weight_bytes
    rows = tuple(
        (t.name, t.bandwidth / 1e9, None if t.capacity is None else t.capacity / GIB, s * 1e3,
         transfer_s(weights, t.bandwidth) * 1e3)
        for t, s in zip(known, seconds, strict=True)
    )  # fmt: skip
    bars = Bars("", Axis("time", "ms"), tuple(t.name for t in known), {"": tuple(s * 1e3 for s in seconds)})
    facts = (
        Fact("the slowest memory against the fastest", seconds[-1] / seconds[0], "×"),
        Fact(f"weights of {model} as {precision}", weights / 1e9, "GB"),
        Fact("tokens/s of one request, if every token reads them from device memory",
             1 / transfer_s(weights, hardware.bandwidth)),
        Fact("and from the host over PCIe" if hardware.host_bandwidth else "and from an NVMe drive",
             1 / transfer_s(weights, hardware.host_bandwidth or known[-1].bandwidth)),
    )  # fmt: skip
    header = ("memory", "GB/s", "GiB", f"{gigabytes:g} GB, ms", f"{model}, ms")
    return Picture(f"{hardware.title}: {gigabytes:g} GB", (bars, Table("", header, rows), Facts("", facts)))


SIMULATION = Simulation(
    "memory-hierarchy",
    "Memory hierarchy",
    "Each memory further away is larger and slower; a token's time is where its weights and K and V lie.",
    (
        choice("device", "device", "h100", DEVICES),
        number("gigabytes", "bytes to move", 1.0, 0.001, 1000.0, 1.0, "GB"),
        choice("model", "model", "llama-3.1-8b", MODELS),
        choice("precision", "weights", "bf16", ("bf16", "fp8", "int8", "int4")),
    ),
    draw,
)
