"""The controller on the simulator: where the default budget breaks p95 TPOT it holds, and gives no goodput away."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config import CacheConfig, SchedulerConfig
from quire.cost.cost_model import CostModel, Curve
from quire.slo import Slo
from quire_lab.bench.summary import summarize
from quire_lab.sim.replica import ClusterConfig
from quire_lab.sim.run import simulate
from quire_lab.workload.build import at_rate, from_trace
from quire_lab.workload.traces import read_trace

# About an 8B model on an H100: 6 ms a step, 35 µs a row, 50 ns a key, 0.1 µs … a thousand pairs.
MODEL = CostModel(
    6e-3, Curve((0.0, 1.0), (0.0, 3.5e-5)), per_seq_s=2e-5, per_decode_kv_s=4e-8, per_pair_s=1e-10
)
SLO = Slo(ttft_s=3.0, tpot_s=0.025)


@pytest.mark.parametrize(("trace", "rate"), [("azure_llm_2023_code", 4.0), ("azure_llm_2023_conv", 20.0)])
def test_tpot_holds_where_the_default_breaks_it(shared_data: Path, trace: str, rate: float) -> None:
    rows = read_trace(shared_data / "traces" / f"{trace}.csv.gz")
    load = at_rate(from_trace(rows, limit=120, max_model_len=8192), rate)

    def run(budget: int, tpot_s: float | None = None) -> dict[str, float]:
        scheduler = SchedulerConfig(max_num_batched_tokens=budget, max_model_len=8192)
        config = ClusterConfig(scheduler, CacheConfig(num_blocks=30_000), tpot_s=tpot_s)
        summary = summarize(simulate(config, MODEL, load).records, slo=SLO)
        return {"tpot_ms": summary["tpot_ms"]["p95"], "goodput": summary["goodput_per_s"]}

    default, ours = run(8192), run(8192, SLO.tpot_s)
    assert default["tpot_ms"] > 25
    assert ours["tpot_ms"] <= 25
    assert ours["goodput"] >= 0.95 * max(run(budget)["goodput"] for budget in (256, 512, 1024))


def test_with_both_limits_chunks_are_the_largest_that_hold_tpot(shared_data: Path) -> None:
    """Why the controller does not act on TTFT: longer steps shorten it and give more goodput away than they gain, a
    lower running limit makes it longer; and where only TTFT is limited, a budget cannot be too large."""
    rows = read_trace(shared_data / "traces" / "azure_llm_2023_conv.csv.gz")
    load = at_rate(from_trace(rows, limit=120, max_model_len=8192), 20.0)

    def run(
        slo: Slo, budget: int = 8192, seqs: int = 256, aim_s: float | None = SLO.tpot_s
    ) -> tuple[float, float]:
        scheduler = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=8192)
        config = ClusterConfig(scheduler, CacheConfig(num_blocks=30_000), tpot_s=aim_s)
        summary = summarize(simulate(config, MODEL, load).records, slo=slo)
        return summary["ttft_ms"]["p95"], summary["goodput_per_s"]

    ttft, goodput = run(SLO)
    longer, few = run(SLO, aim_s=0.025 * 1.4), run(SLO, seqs=24)
    assert longer[0] < ttft
    assert longer[1] < goodput
    assert few[0] > ttft
    assert few[1] <= goodput
    only = Slo(ttft_s=1.0)
    small, middle, large = (run(only, budget, aim_s=None)[1] for budget in (128, 1024, 8192))
    assert small < middle
    assert middle <= 1.02 * large
