"""Overload in the simulator: the time told to rejected clients is honest, and what is admitted stays quick."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quire.config import CacheConfig, SchedulerConfig
from quire.cost.cost_model import CostModel, Curve
from quire_lab.bench.summary import RequestRecord
from quire_lab.sim.replica import ClusterConfig
from quire_lab.sim.run import simulate
from quire_lab.workload.build import Synthetic
from quire_lab.workload.distributions import Arrivals, Uniform

pytestmark = pytest.mark.component

STEP = CostModel(fixed_s=0.020, rows=Curve((1.0, 1025.0), (0.0, 0.400)))
SUSTAINABLE = 4.7  # requests per second of `run`'s workload


def run(
    load: float, seed: int, num: int = 400, retries: int = 0, **config: object
) -> tuple[RequestRecord, ...]:
    """Return the records of ``num`` requests at ``load`` × the rate that can be sustained."""
    made = Synthetic(num, Uniform(20, 400), Uniform(10, 150), Arrivals(load * SUSTAINABLE)).build(seed)
    scheduler = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256, max_model_len=1024)
    cluster = ClusterConfig(
        replace(scheduler, **config),  # type: ignore[arg-type]
        CacheConfig(num_blocks=4096, model_key="sim"),
        retries=retries,
    )
    return simulate(cluster, STEP, made).records


@pytest.mark.parametrize("bound", [{"max_queue": 32}, {"max_queue_tokens": 5000}], ids=str)
def test_the_time_told_is_the_wait_of_the_whole_queue(bound: dict[str, float]) -> None:
    """Of a burst, those that found room have their first token before the others were told to come back.

    Nothing was measured when it came, so the time told is an assumption.
    """
    records = run(200.0, 11, retries=1, **bound)
    told = [r.sent_s - r.arrival_s for r in records if r.sent_s > r.arrival_s]
    waited = [r.first_token_s - r.arrival_s for r in records if r.first_token_s and r.sent_s == r.arrival_s]
    print(f"{len(told)} told {min(told):.1f} to {max(told):.1f} s, the last one waited {max(waited):.1f} s")
    assert len(told) > 100
    assert 0.4 * min(told) <= max(waited) <= min(told)


def test_what_is_admitted_stays_quick_at_three_times_the_load() -> None:
    def ttft_p99(records: tuple[RequestRecord, ...]) -> float:
        return float(np.percentile([r.first_token_s - r.arrival_s for r in records if r.first_token_s], 99))

    def goodput(records: tuple[RequestRecord, ...]) -> float:
        end_s = max(r.arrival_s for r in records)
        return sum(r.status == "ok" and r.end_s <= end_s for r in records) / end_s

    below, peak, above = (
        run(load, 3, num, max_ttft_s=3.0) for load, num in ((0.9, 400), (1.5, 600), (3.0, 1200))
    )
    print(f"seed 3: p99 TTFT {ttft_p99(below):.2f} → {ttft_p99(above):.2f} s, goodput {goodput(above):.2f}/s")
    assert ttft_p99(above) <= 1.1 * 3.0, "the limit"
    assert goodput(above) >= 0.9 * max(goodput(below), goodput(peak))
    assert sum(r.status == "ok" for r in above) < 0.5 * len(above)
