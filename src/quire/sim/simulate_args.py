"""The flags of `quire simulate` beside those of the workload and of the engine, as data (see `quire.args`)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.args import flag
from quire.gateway.routing import POLICIES


@dataclass(frozen=True, slots=True)
class SimulateArgs:
    """Step times, replicas, and what happens to them."""

    profile: str | None = flag(None, "Step times measured by `quire profile`.", group="Step times")
    hardware: str | None = flag(None, "Or a device of the planner's table, by its roofline: h100, mi300x …",
                                group="Step times")  # fmt: skip
    model: str | None = flag(None, "Model on --hardware: a preset of the planner, a folder or a hub id.",
                             group="Step times")  # fmt: skip
    tensor_parallel: int = flag(
        1, "Devices that a replica on --hardware is cut over.", group="Step times", low=1
    )
    weights: str = flag(
        "bf16", "Format of the weights on --hardware: bf16, fp8, int8, int4 …", group="Step times"
    )
    max_in_flight: int | None = flag(
        None, "Steps in flight at once [the profile's; 2 on --hardware].", group="Step times", low=1, high=8
    )
    scenario: str | None = flag(None, "Run an experiment that ships with Quire: its name, or list.",
                                group="Scenario")  # fmt: skip
    beside: str | None = flag(None, "JSON of a measured sweep (quire bench serve --sweep --json): --html draws both in "
                              "one page.", group="Results")  # fmt: skip
    replicas: int = flag(1, "Engines behind the router.", group="Cluster", low=1, high=4096)
    routing: str = flag("least-loaded", "Which replica gets a request.", group="Cluster", choices=POLICIES)
    max_load_ratio: float = flag(1.25, "A prefix may win where a replica's load is within this of the mean.",
                                 group="Cluster", low=1.0)  # fmt: skip
    start_up_s: float = flag(0.0, "Seconds until a replica that is added or restarted is ready.", group="Cluster",
                             low=0.0)  # fmt: skip
    fault: str | None = flag(None, "What happens, by semicolons: kill:at=30,replica=0; slow:at=10,until=40,replica=1,"
                             "factor=3; add:at=60,count=2.", group="Cluster")  # fmt: skip
    preemption: str = flag("recompute", "What a preempted sequence gets back by: computing it again, or a copy kept in "
                           "host memory.", group="Cluster", choices=("recompute", "swap"))  # fmt: skip
    swap_gb_s: float = flag(20.0, "GB/s of that copy, out and in.", group="Cluster", low=0.001)
    acceptance: float | None = flag(None, "Speculation: probability that a draft is accepted.", group="Speculation",
                                    low=0.0, high=1.0)  # fmt: skip
    num_drafts: int = flag(
        4, "Speculation: drafts before each verification.", group="Speculation", low=1, high=64
    )
    draft_cost: float = flag(0.0, "Speculation: a draft step as a share of a decode step.", group="Speculation",
                             low=0.0, high=1.0)  # fmt: skip
