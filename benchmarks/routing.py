"""Routing policies on held traces, in the simulator: hit rate, TTFT and goodput of each policy behind 16 replicas.

    python -m benchmarks.routing --traces ../shared/data/traces        # tables; about 8 minutes of one core

Every trace keeps its order and its shares of prompts; its arrivals are stretched to a number of rates, the same for all
policies. Goodput is the best over these rates: requests per second that met the SLO. The other columns are of the rate
at which round robin's goodput is best.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.slo import Slo
from quire_lab.bench.args import ServeBenchArgs, SimulateArgs
from quire_lab.sim.run import simulate, summary_of
from quire_lab.sim.setup import set_up
from quire_lab.workload.build import at_rate, from_trace
from quire_lab.workload.request import Workload
from quire_lab.workload.traces import read_trace

POLICIES = (
    "round-robin", "prefix-predicted", "prefix-hash", "least-loaded", "prefix-hybrid", "power-of-two", "least-tokens",
)  # fmt: skip
NUM_REPLICAS = 16


@dataclass(frozen=True, slots=True)
class Held:
    """One trace."""

    name: str
    file: str
    slo: str
    rates: tuple[float, ...]  # requests per second, for all replicas together
    limit: int
    shares: bool  # prompts have prefixes in common


_CHAT = "ttft=300ms,tpot=40ms"
HELD = (
    Held("conversation", "mooncake_conversation.jsonl.gz", "ttft=2s,tpot=50ms", (6, 10, 16), 1000, True),
    Held("synthetic", "mooncake_synthetic.jsonl.gz", "ttft=2s,tpot=50ms", (12, 24), 1000, True),
    Held("chats, nothing shared", "azure_llm_2023_conv.csv.gz", _CHAT, (160,), 2000, False),
    Held("code, nothing shared", "azure_llm_2023_code.csv.gz", _CHAT, (120,), 2000, False),
)


def run(workload: Workload, policy: str, slo: str) -> Mapping[str, Any]:
    """Return the summary of one simulation."""
    args = SimulateArgs(hardware="h100", model="llama-3.1-8b", replicas=NUM_REPLICAS, routing=policy)  # type: ignore[arg-type]
    setup = set_up(args, ServeBenchArgs(seed=3), {})
    return summary_of(simulate(setup.config, setup.step_time, workload), Slo.parse(slo), workload)


def measure(held: Held, folder: Path, policies: tuple[str, ...]) -> dict[str, Any]:
    """Return policy → rate → figures."""
    workload = from_trace(read_trace(folder / held.file), limit=held.limit, max_model_len=131072, seed=3)
    found: dict[str, Any] = {}
    for policy in policies:
        for rate in held.rates:
            begin = time.process_time()
            s = run(at_rate(workload, rate), policy, held.slo)
            prompt = sum(r.num_prompt_tokens for r in workload.requests)
            found.setdefault(policy, {})[rate] = {
                "goodput": s["goodput_per_s"], "p50": s["ttft_ms"]["p50"], "p99": s["ttft_ms"]["p99"],
                "hits": s["num_cached_tokens"] / prompt, "rate": s["requests_per_s"],
            }  # fmt: skip
            print(
                f"# {held.name} {policy} {rate}: {found[policy][rate]} {time.process_time() - begin:.0f} s",
                flush=True,
            )
    return found


def table(held: Held, found: Mapping[str, Any]) -> str:
    """Return the trace's table."""
    plain = found["round-robin"]
    at = max(held.rates, key=lambda rate: plain[rate]["goodput"])
    base = plain[at]["goodput"]
    lines = [
        f"{held.name} (`{held.file}`, first {held.limit:,}), {held.slo}, rates {', '.join(map(str, held.rates))}:\n",
        f"| policy | goodput/s | times round robin's | at {at:g}/s: TTFT p50, p99 ms | cached |",
        "|---|---|---|---|---|",
    ]
    for policy, by_rate in found.items():
        best, there = max(f["goodput"] for f in by_rate.values()), by_rate[at]
        lines.append(
            f"| {policy} | {best:.2f} | {best / base:.2f} | {there['p50']:,.0f}, {there['p99']:,.0f} | "
            f"{there['hits']:.1%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True, help="folder of the trace files")
    parser.add_argument("--only", default="", help="part of a trace's file name")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {}
    for held in HELD:
        if args.only in held.file:
            results[held.file] = found = measure(held, args.traces, tuple(args.policies.split(",")))
            print(table(held, found), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
