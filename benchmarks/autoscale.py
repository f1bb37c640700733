"""The number of replicas by predicted load, beside a utilisation threshold, on held traces in the simulator.

    python -m benchmarks.autoscale --traces ../shared/data/traces      # about 15 minutes of one core

Every trace has its own arrival times. SLO attainment is the share of all requests that met the SLO; replica-hours are
those from the moment a replica is asked for until its last request has ended. A cold start takes 60 s. The threshold is
the rule of Kubernetes' HorizontalPodAutoscaler with its defaults (a look every 15 s, 300 s before it takes away).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.slo import Slo
from quire_lab.bench.args import ServeBenchArgs, SimulateArgs
from quire_lab.sim.run import simulate, summary_of
from quire_lab.sim.setup import set_up
from quire_lab.workload.build import from_trace
from quire_lab.workload.request import Workload
from quire_lab.workload.traces import read_trace

# file, hardware, SLO, routing, replicas at the start
HELD = (
    ("azure_llm_2023_conv.csv.gz", "l4", "ttft=1s,tpot=100ms", "least-loaded", 4),
    ("azure_llm_2023_code.csv.gz", "l4", "ttft=2s,tpot=100ms", "least-loaded", 4),
    ("mooncake_conversation.jsonl.gz", "h100", "ttft=2s,tpot=50ms", "prefix-predicted", 4),
)
POLICIES: dict[str, dict[str, Any]] = {
    "predicted load": {"autoscale": "predicted"},
    "predicted load, headroom 0.65": {"autoscale": "predicted", "headroom": 0.65},
    "utilisation 50 %": {"autoscale": "utilisation", "target_busy": 0.5, "interval_s": 15.0},
    "utilisation 70 %": {"autoscale": "utilisation", "target_busy": 0.7, "interval_s": 15.0},
    "utilisation 90 %": {"autoscale": "utilisation", "target_busy": 0.9, "interval_s": 15.0},
}


def run(workload: Workload, hardware: str, slo: str, routing: str, **given: Any) -> Mapping[str, Any]:
    """Return the summary of one simulation."""
    settings: dict[str, Any] = {"hardware": hardware, "model": "llama-3.1-8b", "routing": routing, **given}
    flags = ServeBenchArgs(seed=3, slo=slo)
    setup = set_up(SimulateArgs(**settings), flags, {})
    result = simulate(setup.config, setup.step_time, workload, scaling=setup.scaling)
    return summary_of(result, Slo.parse(slo), workload)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True, help="folder of the trace files")
    parser.add_argument("--only", default="", help="part of a trace's file name")
    parser.add_argument("--limit", type=int, default=None)
    args = parser.parse_args()
    for file, hardware, slo, routing, replicas in HELD:
        if args.only not in file:
            continue
        workload = from_trace(read_trace(args.traces / file), limit=args.limit, max_model_len=131072, seed=3)
        print(f"\n`{file}`, {hardware}, {slo}, from {replicas} replicas:\n")
        print(
            "| policy | SLO attained | replica-hours | most replicas | TTFT p50, p99 ms |\n|---|---|---|---|---|"
        )
        for name, given in POLICIES.items():
            s = run(
                workload, hardware, slo, routing, replicas=replicas, max_replicas=24, start_up_s=60.0, **given
            )
            sim, ttft = s["simulation"], s["ttft_ms"]
            print(f"| {name} | {sim['attainment']:.1%} | {sim['replica_hours']:.2f} | {sim['peak_replicas']} | "
                  f"{ttft['p50']:,.0f}, {ttft['p99']:,.0f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
