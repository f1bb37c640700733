"""What tokens cost: the rent of the devices over what they do, shared between input and output by time."""

from __future__ import annotations

from dataclasses import dataclass

from quire.plan.estimate import Estimate, Load
from quire.plan.hardware import Hardware

MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Cost:
    """USD. None where the table has no price."""

    usd_per_hour: float | None
    usd_per_million_input: float | None
    usd_per_million_output: float | None
    price_source: str


def cost_of(hardware: Hardware, num_devices: int, replicas: int, load: Load, estimate: Estimate) -> Cost:
    """Return the cost of ``replicas`` at ``estimate``: prompts take the share rate · tp of busy time."""
    price = hardware.price
    if price is None:
        return Cost(None, None, None, "unknown")
    usd_per_s = price.usd * num_devices / 3600
    rate = estimate.rate * replicas
    decode_s = load.osl * estimate.decode_s / max(1.0, estimate.concurrency)  # of device time, a request
    share = estimate.prefill_s / (estimate.prefill_s + decode_s)
    per_request = usd_per_s / rate if rate else float("inf")
    return Cost(
        usd_per_hour=price.usd * num_devices,
        usd_per_million_input=per_request * share / load.isl * MILLION,
        usd_per_million_output=per_request * (1 - share) / load.osl * MILLION,
        price_source=f"{price.source}, {price.date}",
    )
