"""Tens of thousands of random steps through the real scheduler, cache and core. A failure prints its seed."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.sim.driver import Driver
from tests.sim.scenario import make_scenario

NUM_SEEDS = 180  # five rounds of 36: every gate × order × steps in flight, with other sizes each time
SEEDS_PER_TEST = 12


def run_seed(seed: int) -> Counter[str]:
    scenario = make_scenario(seed)
    try:
        return Driver(scenario).run()
    except Exception as error:
        raise AssertionError(
            f"seed {seed}: {error}\nreplay: pytest tests/sim --fuzz-seed {seed}\n{scenario}"
        ) from error


_seen: Counter[str] = Counter()


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_fuzz(first: int, request: pytest.FixtureRequest) -> None:
    only = request.config.getoption("--fuzz-seed", default=None)
    for seed in range(first, first + SEEDS_PER_TEST):
        if only is None or only == seed:
            _seen.update(run_seed(seed))
