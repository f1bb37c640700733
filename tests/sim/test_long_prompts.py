"""A prompt of 8,000 tokens and short requests beside it, through the simulated engine on the virtual clock."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean, median

import pytest

from quire.config import CacheConfig, OrderKind, SchedulerConfig
from quire.cost.cost_model import CostModel, Curve
from quire_lab.sim.replica import ClusterConfig
from quire_lab.sim.run import Simulated, simulate
from quire_lab.workload.request import Workload, WorkloadRequest

# A 135M model in bf16 on two Zen 4 cores: a step costs as much as two rows, and 1.3 ms per row (long-prompts.md).
STEP = CostModel(fixed_s=0.0026, rows=Curve((0.0, 2048.0), (0.0, 2048 * 0.0013)))
ON = SchedulerConfig(max_num_seqs=64, max_model_len=16384, long_prefill_token_threshold=108)
OFF = replace(ON, long_prefill_token_threshold=0)
CACHE = CacheConfig(num_blocks=4096, model_key="sim", enable_prefix_caching=False)


def run(config: SchedulerConfig, *requests: tuple[float, int, int]) -> Simulated:
    """Requests of (arrival, prompt, output)."""
    made = (WorkloadRequest(t, p, o, index=i) for i, (t, p, o) in enumerate(requests))
    return simulate(ClusterConfig(config, CACHE), STEP, Workload(tuple(made), {}, "by hand"))


def first_tokens_s(result: Simulated, prompt: int) -> list[float]:
    found = [r.ttft_s for r in result.records if r.num_prompt_tokens == prompt and r.ttft_s is not None]
    assert found
    return found


def end_s(result: Simulated) -> float:
    return max(r.end_s for r in result.records)


SHORT = [(0.3 + 0.517 * i, 30, 8) for i in range(18)]
ALONE_S = first_tokens_s(run(ON, (0.0, 30, 8)), 30)[0]


@pytest.mark.parametrize("order", ["fcfs", "fair", "priority", "longest-prefix", "deadline"])
def test_short_requests_beside_a_long_one_take_3_times_alone(order: OrderKind) -> None:
    # After the first, short ones have come lately.
    beside = first_tokens_s(run(replace(ON, order=order), (0.0, 30, 1), (0.2, 8000, 8), *SHORT), 30)
    assert median(beside) <= 3 * ALONE_S
    assert max(beside) <= 5 * ALONE_S
    whole = first_tokens_s(run(replace(OFF, order=order), (0.0, 8000, 8), *SHORT), 30)
    assert mean(whole) >= 20 * ALONE_S  # what the share is for


def test_the_share_keeps_98_percent_of_throughput() -> None:
    requests = [(0.0, 8000, 64), *SHORT]
    assert end_s(run(OFF, *requests)) / end_s(run(ON, *requests)) >= 0.98


def test_many_long_prompts_with_short_ones_between_all_end() -> None:
    longs = [(0.01 * i, 4000, 4) for i in range(6)]
    result = run(ON, *longs, *((0.05 * i, 30, 4) for i in range(600)))
    assert len(result.records) == 606
    assert all(record.status == "ok" for record in result.records)
    assert median(first_tokens_s(result, 30)) <= 10 * ALONE_S
