"""``quire serve --slo`` against static chunk budgets, on the simulator: is p95 TPOT held, and at what goodput?

    python benchmarks/slo_controller.py [--traces DIR] [--limit 400] [--model llama-3.1-8b] [--gpu h100]

    python benchmarks/slo_controller.py --around --limit 150      what more or less than the controller does would give

For each trace: the knee is the highest rate at which one of three middling static budgets still serves 95 % of the
requests within the SLO; the comparison with eight runs at 0.9 of it. Everything is a function of the arguments.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.config import CacheConfig, SchedulerConfig
from quire.cost.cost_model import StepTime
from quire.cost.efficiency import efficiency_of
from quire.cost.hardware import find_hardware
from quire.cost.presets import preset_spec
from quire.cost.roofline import Roofline, decoder_work
from quire.cost.split import Split
from quire.slo import Slo
from quire_lab.bench.summary import summarize
from quire_lab.plan.memory import plan_memory
from quire_lab.sim.replica import ClusterConfig
from quire_lab.sim.run import simulate
from quire_lab.workload.build import at_rate, from_trace
from quire_lab.workload.request import Workload
from quire_lab.workload.traces import read_trace

TRACES = ("azure_llm_2023_conv.csv.gz", "azure_llm_2023_code.csv.gz", "rtp_llm_online_30min.jsonl.gz")
BUDGETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
DEFAULT_BUDGET = 8192
MAX_MODEL_LEN = 16384


class Bench:
    """One replica of a model on a device, and an SLO."""

    def __init__(self, model: str, gpu: str, slo: Slo) -> None:
        spec, hardware = preset_spec(model), find_hardware(gpu)
        memory = plan_memory(spec, hardware, Split(), precision="bf16", kv_dtype="bf16", context=4096,
                             max_num_batched_tokens=DEFAULT_BUDGET, max_num_seqs=256)  # fmt: skip
        self.step_time: StepTime = Roofline(
            decoder_work(spec), hardware, efficiency_of("default", hardware, spec, "bf16")
        )
        self.cache = CacheConfig(num_blocks=memory.kv_pool // (memory.kv_bytes_per_token * 16))
        self.slo = slo

    def run(
        self,
        workload: Workload,
        budget: int,
        *,
        controlled: bool = False,
        steps: float = 1.0,
        max_num_seqs: int = 256,
    ) -> dict[str, Any]:
        """Return the summary of a simulation. ``steps``: the controller aims at so much of the TPOT."""
        scheduler = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            max_queue=1_000_000,
        )
        aim_s = self.slo.tpot_s * steps if controlled and self.slo.tpot_s else None
        config = ClusterConfig(scheduler, self.cache, tpot_s=aim_s)
        return summarize(simulate(config, self.step_time, workload).records, slo=self.slo)

    def best(self, workload: Workload) -> dict[int, dict[str, Any]]:
        return {budget: self.run(workload, budget) for budget in BUDGETS}

    def knee(self, workload: Workload, rounds: int = 6) -> float:
        """The highest rate at which one of three middling budgets serves 95 % within the SLO, by bisection."""
        low, high = 0.25, 64.0
        for _ in range(rounds):
            rate = math.sqrt(low * high)
            load = at_rate(workload, rate)
            share = max(self.share(self.run(load, budget), load) for budget in (256, 512, 1024))
            low, high = (rate, high) if share >= 0.95 else (low, rate)
        return low

    @staticmethod
    def share(summary: dict[str, Any], workload: Workload) -> float:
        return float(summary["goodput_per_s"] * summary["duration_s"]) / len(workload.requests)


def around(bench: Bench, args: argparse.Namespace) -> None:
    """Longer and shorter steps and lower running limits than the controller's; and budgets where only TTFT counts."""
    ttft_only = Bench(args.model, args.gpu, Slo(ttft_s=1.0))
    for name, rates in zip(TRACES, ((17, 22), (1.8, 6), (3.3, 5)), strict=True):
        workload = from_trace(read_trace(args.traces / name), limit=args.limit, max_model_len=MAX_MODEL_LEN)
        for rate in rates:
            load = at_rate(workload, rate)
            print(f"{name}, {rate} requests/s: p95 TTFT, p95 TPOT, goodput")
            for budget in (256, 1024, 2048, 4096, 8192):
                print(f"  only ttft=1s, budget {budget}: {row(ttft_only.run(load, budget))}", flush=True)
            for share in (0.87, 1.0, 1.09, 1.25, 1.5):
                ours = bench.run(load, DEFAULT_BUDGET, controlled=True, steps=share)
                print(f"  steps of {share} × the controller's: {row(ours)}", flush=True)
            for seqs in (16, 32, 64):
                ours = bench.run(load, DEFAULT_BUDGET, controlled=True, max_num_seqs=seqs)
                print(f"  at most {seqs} running: {row(ours)}", flush=True)


def row(summary: dict[str, Any]) -> str:
    return f"{summary['ttft_ms']['p95']:.0f} ms, {cell(summary)}"


def cell(summary: dict[str, Any]) -> str:
    return f"{summary['tpot_ms']['p95']:.1f} ms, {summary['goodput_per_s']:.2f}/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--traces", type=Path, default=Path("/work/shared/data/traces"))
    parser.add_argument("--limit", type=int, default=400)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--slo", default="ttft=3s,tpot=25ms")
    parser.add_argument("--around", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    slo = Slo.parse(args.slo)
    bench = Bench(args.model, args.gpu, slo)
    if args.around:
        around(bench, args)
        return
    results = {}
    print(f"{args.model} on {args.gpu}, {slo}\n")
    print(
        "| trace | requests/s | controller: p95 TPOT, goodput | best static | default: p95 TPOT, goodput | ratio |"
    )
    print("|---|---|---|---|---|---|")
    for name in TRACES:
        trace = read_trace(args.traces / name)
        workload = from_trace(trace, limit=args.limit, max_model_len=MAX_MODEL_LEN)
        workload = replace(workload, source=name)
        rate = 0.9 * bench.knee(workload)
        load = at_rate(workload, rate)
        static = bench.best(load)
        ours = bench.run(load, DEFAULT_BUDGET, controlled=True)
        budget = max(static, key=lambda b: static[b]["goodput_per_s"])
        default = static[DEFAULT_BUDGET]
        ratio = ours["goodput_per_s"] / static[budget]["goodput_per_s"]
        results[name] = {"rate": rate, "controller": ours, "static": static, "ratio": ratio}
        cells = (
            name.partition(".")[0],
            f"{rate:.2f}",
            cell(ours),
            f"{budget}: {cell(static[budget])}",
            cell(default),
        )
        print(f"| {' | '.join(cells)} | {ratio:.3f} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
