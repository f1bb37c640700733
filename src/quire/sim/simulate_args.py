"""The flags of `quire simulate` beside those of the workload and of the engine (see `quire.args`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.gateway.routing import Policy


@dataclass(frozen=True, slots=True)
class SimulateArgs:
    """Step times, replicas, and what happens to them."""

    profile: str | None = None
    hardware: str | None = None
    model: str | None = None
    tensor_parallel: int = 1
    weights: str = "bf16"
    max_in_flight: int | None = None
    scenario: str | None = None
    beside: str | None = None
    replicas: int = 1
    routing: Policy = "least-loaded"
    max_load_ratio: float = 1.25
    start_up_s: float = 0.0
    fault: str | None = None
    preemption: Literal["recompute", "swap"] = "recompute"
    swap_gb_s: float = 20.0
    acceptance: float | None = None
    num_drafts: int = 4
    draft_cost: float = 0.0
