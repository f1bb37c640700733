"""`plan --search` against brute force over a grid of 48: tp 1, 2, 4, 8 × 1 … 4 replicas × 3 chunk budgets."""

from __future__ import annotations

import pytest

from quire.cost.hardware import find_hardware
from quire.cost.presets import preset_spec
from quire.slo import Slo
from quire_lab.plan.capacity import Question
from quire_lab.plan.estimate import Load
from quire_lab.sim.search import Found, Search
from quire_lab.workload.build import Synthetic
from quire_lab.workload.distributions import Arrivals, Fixed

pytestmark = pytest.mark.component


def searching(rate: float, slo: Slo, num_requests: int) -> Search:
    question = Question(
        model="llama-3.1-8b", spec=preset_spec("llama-3.1-8b"), hardware=find_hardware("h100"), count=32,
        load=Load(1024, 64, rate=rate), max_num_batched_tokens=8192, max_num_seqs=256, slo=slo,
    )  # fmt: skip
    workload = Synthetic(num_requests, Fixed(1024), Fixed(64), Arrivals(rate)).build(seed=1)
    return Search(question, workload)


def brute_force(search: Search, max_replicas: int) -> Found:
    """Simulate every setting of the grid."""
    grid = search.grid(max_replicas)
    tried = [search.attempt(setting) for setting in grid]
    holding = [t for t in tried if t.share >= search.share]
    best = min(holding, key=lambda t: (t.cost, -t.goodput_per_s), default=None)
    return Found(best, tuple(tried), len(grid))


@pytest.mark.parametrize(
    ("rate", "slo", "num_requests"),
    [
        (60.0, Slo(0.3, 0.025), 16),
        pytest.param(30.0, Slo(0.5, 0.03), 100, marks=pytest.mark.slow),
        pytest.param(60.0, Slo(0.3, 0.025), 100, marks=pytest.mark.slow),
        pytest.param(10.0, Slo(0.25, 0.006), 60, marks=pytest.mark.slow),  # one device decodes too slowly
        pytest.param(200.0, Slo(0.4, 0.02), 100, marks=pytest.mark.slow),
    ],
)
def test_within_a_twentieth_of_brute_force(rate: float, slo: Slo, num_requests: int) -> None:
    brute = brute_force(searching(rate, slo, num_requests), 4)
    found = searching(rate, slo, num_requests).find(4)
    assert brute.grid_size == 48
    assert len(brute.tried) == 48
    assert len(found.tried) < 40
    if brute.best is None:
        assert found.best is None
        return
    assert found.best is not None
    assert found.best.share >= 0.95
    assert found.best.cost <= 1.05 * brute.best.cost


def test_nothing_holds_what_no_device_can() -> None:
    assert searching(5.0, Slo(0.001, 0.0001), 10).find(2).best is None
