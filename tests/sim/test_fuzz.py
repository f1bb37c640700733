"""Tens of thousands of random steps through the real scheduler, cache and core. A failure prints its seed.

Each seed is a scenario (`scenario`) and its run (`driver`): after every step the books of the cache are checked, at
the end nothing may be held, every sample must have ended once, and its tokens must be the oracle's. The last test
asserts that the run exercised what it is for.

    pytest tests/sim --fuzz-seed 17        replay one seed
    pytest tests/sim -m slow               ten times as many (the default of `make test` leaves them out)
"""

from __future__ import annotations

from collections import Counter

import pytest
from tests.sim.driver import Driver
from tests.sim.scenario import make_scenario, widened, with_states

from quire.config import GATES, ORDERS

pytestmark = pytest.mark.component

NUM_SEEDS = 108  # three rounds of 36: every gate × order × steps in flight
SEEDS_PER_TEST = 12
# What the default run must have done at least (it does two to five times as much).
COVERAGE = {
    "steps": 10_000,
    "preemptions": 300,
    "forks": 400,
    "zombie_results": 1000,
    "aborts in flight": 30,
    "cached_tokens": 4000,
    "failed_steps": 150,
    "restarted_readers": 200,
    "error step": 300,
    "error capacity": 100,
    "error never_fits": 50,
    "stop strings": 80,
    "resumed": 200,
    "chunks": 1500,
    "mixed steps": 500,
    "moves": 1000,
    "adapter loads": 200,
    "adapter waits": 300,
    "merge": 500,
    "fill": 20,
    "slide": 2000,
    "strip": 200,
    "evicted_blocks": 4000,
    "policy changes": 30,
    "error hopeless": 20,
    "late total": 20,
    "late first_token": 20,
    "cache resets in flight": 30,
    "steps with cleared nodes": 200,
    "beams": 60,
    "scored prompts": 50,
}
# Of the seeds with drafts and transfers.
NUM_WIDE_SEEDS = 72
WIDE_COVERAGE = {
    "drafts": 4000,
    "accepted drafts": 1500,
    "rejected drafts": 500,
    "loads": 150,
    "stores": 2000,
    "loaded_blocks": 500,
    "stored_blocks": 5000,
    "partial loads": 25,
    "failed_transfers": 300,
    "deaths": 20,
    "transfers lost": 10,
}
# Of the seeds of a model with recurrent states.
NUM_STATE_SEEDS = 72
STATE_COVERAGE = {
    "state moves": 500,
    "saves": 2000,
    "checkpoint_loads": 150,
    "evicted_checkpoints": 300,
    "cached_tokens": 500,
    "restarted_readers": 50,
    "preemptions": 100,
    "forks": 100,
    "accepted drafts": 100,
    "rejected drafts": 100,
}
_seen_states: Counter[str] = Counter()
_seen: Counter[str] = Counter()
_seen_wide: Counter[str] = Counter()


def run_seed(seed: int, *, wide: bool = False, states: bool = False) -> Counter[str]:
    scenario = widened(make_scenario(seed)) if wide else make_scenario(seed)
    scenario = with_states(scenario) if states else scenario
    try:
        seen = Driver(scenario).run()
    except Exception as error:
        raise AssertionError(
            f"seed {seed}: {error}\nreplay: pytest tests/sim --fuzz-seed {seed}\n{scenario}"
        ) from error
    seen[f"{scenario.scheduler.gate} × {scenario.scheduler.order}"] += seen["steps"]
    seen[f"{scenario.max_in_flight} in flight"] += seen["steps"]
    seen[f"{len(scenario.cache.windows)} groups"] += seen["steps"]
    return seen


def run_seeds(request: pytest.FixtureRequest, first: int, count: int, *, wide: bool = False) -> None:
    only = request.config.getoption("--fuzz-seed", default=None)
    for seed in range(first, first + count) if only is None else [only]:
        (_seen_wide if wide else _seen).update(run_seed(seed, wide=wide))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_fuzz(first: int, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--fuzz-seed", default=None) is not None and first:
        pytest.skip("--fuzz-seed replays one seed")
    run_seeds(request, first, SEEDS_PER_TEST)


@pytest.mark.parametrize("first", range(0, NUM_WIDE_SEEDS, SEEDS_PER_TEST))
def test_fuzz_with_drafts_and_transfers(first: int, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--fuzz-seed", default=None) is not None and first:
        pytest.skip("--fuzz-seed replays one seed")
    run_seeds(request, first, SEEDS_PER_TEST, wide=True)


@pytest.mark.parametrize("first", range(0, NUM_STATE_SEEDS, SEEDS_PER_TEST))
def test_fuzz_with_recurrent_states(first: int, request: pytest.FixtureRequest) -> None:
    only = request.config.getoption("--fuzz-seed", default=None)
    for seed in range(first, first + SEEDS_PER_TEST) if only is None else [only]:
        _seen_states.update(run_seed(seed, states=True))


def test_the_fuzz_of_states_exercised_what_it_is_for() -> None:
    if _seen_states["steps"] < 3000:
        pytest.skip("only after the whole of test_fuzz_with_recurrent_states")
    print(dict(sorted(_seen_states.items())))
    missed = {n: (_seen_states[n], least) for n, least in STATE_COVERAGE.items() if _seen_states[n] < least}
    assert not missed, f"(seen, expected at least): {missed}"


def test_the_wide_fuzz_exercised_what_it_is_for() -> None:
    if _seen_wide["steps"] < 5000:
        pytest.skip("only after the whole of test_fuzz_with_drafts_and_transfers")
    print(dict(sorted(_seen_wide.items())))
    missed = {n: (_seen_wide[n], least) for n, least in WIDE_COVERAGE.items() if _seen_wide[n] < least}
    assert not missed, f"(seen, expected at least): {missed}"


def test_the_fuzz_exercised_what_it_is_for() -> None:
    if _seen["2 in flight"] == 0 or _seen["steps"] < COVERAGE["steps"]:
        pytest.skip("only after the whole of test_fuzz")
    print(dict(sorted(_seen.items())))
    missed = {name: (_seen[name], least) for name, least in COVERAGE.items() if _seen[name] < least}
    assert not missed, f"(seen, expected at least): {missed}"
    for pair in (f"{gate} × {order}" for gate in GATES for order in ORDERS):
        assert _seen[pair] >= 300, f"{pair}: {_seen[pair]} steps"
    for name in ("1 in flight", "2 in flight", "4 in flight", "1 groups", "2 groups", "3 groups"):
        assert _seen[name] >= 1000, f"{name}: {_seen[name]} steps"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 2080, 36))
def test_fuzz_at_length(first: int, request: pytest.FixtureRequest) -> None:
    run_seeds(request, first, 36)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1720, 36))
def test_wide_fuzz_at_length(first: int, request: pytest.FixtureRequest) -> None:
    run_seeds(request, first, 36, wide=True)
