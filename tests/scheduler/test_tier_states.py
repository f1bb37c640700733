"""A tier of a model with recurrent layers: blocks and a state at their end are one object."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.scheduler.harness import request
from tests.scheduler.test_tiers import PROMPT, Bench, FakeTier

from quire.cache.prefix_cache import group_block_hash
from quire.request import FinishReason

SIZE = 4
SLOTS = {"num_states": 8, "num_checkpoints": 16}


def warm(prompt: tuple[int, ...] = PROMPT, max_tokens: int = 2) -> tuple[Bench, FakeTier]:
    """Return a new engine whose tier has what another one left of a prompt and its answer."""
    first = Bench(**SLOTS)
    first.scheduler.add(request("a", prompt, max_tokens=max_tokens), 0.0)
    first.run()
    first.step()  # the answer's end is stored
    first.run()
    return Bench(first.tier, **SLOTS), first.tier


def served(bench: Bench, prompt: tuple[int, ...] = PROMPT) -> tuple[int, int]:
    """Return how many tokens of a prompt came from the tier, and how many from the cache."""
    bench.add("b", prompt)
    bench.run()
    timing = bench.timing["b"]
    return timing.num_loaded_tokens, timing.num_cached_tokens


def test_a_prompt_goes_on_from_a_state_of_the_tier() -> None:
    bench, tier = warm()
    assert len(tier.keys) == 4 + 1, "the blocks, and the state at the prompt's end alone"
    bench.add("b")
    bench.step()
    assert bench.loads == [5]
    bench.run()
    timing = bench.timing["b"]
    assert (timing.num_loaded_tokens, timing.num_cached_tokens) == (16, 16)
    assert bench.scheduler.stats().num_stored_blocks == 0, "the tier has them"


def test_blocks_without_a_state_are_not_loaded() -> None:
    bench, tier = warm()
    table = bench.scheduler.cache.new_table()
    bench.scheduler.cache.match(table, PROMPT)
    tier.keys &= {group_block_hash(row, 0) for row in table.chain}
    assert len(tier.keys) == 4
    assert served(bench) == (0, 0)


def test_a_load_without_its_state_brings_nothing() -> None:
    bench, _ = warm()
    bench.add("b")
    bench.step()
    bench.tier.end(4)  # without the last one, the state
    bench.run()
    timing = bench.timing["b"]
    assert (timing.num_loaded_tokens, timing.num_cached_tokens) == (0, 0)


def test_only_the_state_is_loaded_where_the_blocks_are_there() -> None:
    bench, _ = warm()
    assert served(bench) == (16, 16)
    slots = bench.scheduler.cache.states
    assert slots is not None
    while slots.evict(1e9):
        pass
    bench.add("c")
    bench.step()
    assert bench.loads == [1]
    bench.run()
    assert bench.timing["c"].num_cached_tokens == 16


def test_a_prompt_that_ends_with_a_block_is_found_again() -> None:
    bench, _ = warm(PROMPT[:16])
    assert served(bench, PROMPT[:16]) == (12, 12), "its last token is computed"
    bench, _ = warm(PROMPT[:16])
    assert served(bench, PROMPT) == (16, 16)


def test_the_next_turn_goes_on_from_the_end_of_the_answer() -> None:
    bench, _ = warm(PROMPT, max_tokens=13)
    answer = (5,) * 13  # of every sequence of this bench
    assert served(bench, (*PROMPT, *answer, 70, 71)) == (28, 28)


def test_tier_that_hangs_leaves_a_slot_for_each_seat() -> None:
    """One state is being stored and another one is to be loaded, and there are two slots."""
    _, tier = warm()
    bench = Bench(tier, num_states=1, num_checkpoints=1, max_num_seqs=1)
    bench.add("other", tuple(range(300, 318)))
    bench.run(ends=False)
    bench.step()
    slots = bench.scheduler.cache.states
    assert slots is not None
    assert slots.carried is not None
    assert slots.carried.stored_slots
    bench.add("b")
    bench.run(ends=False)
    assert bench.ends["b"] == FinishReason.LENGTH


def test_rows_before_many_states_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the tier has lost a prompt's first rows and has the states of all turns, the steps wait for the look-up."""
    bench = Bench(num_blocks=128, max_model_len=300, max_num_batched_tokens=300, **SLOTS)
    prompt, slots = tuple(range(258)), bench.scheduler.cache.states
    assert slots is not None
    assert slots.carried is not None
    table = bench.scheduler.cache.new_table()
    bench.scheduler.cache.match(table, prompt)
    bench.tier.keys |= {slots.carried.name_of(row) for row in table.chain}
    num_keys, contains = [0], bench.tier.contains

    def counted(keys: Sequence[bytes]) -> int:
        num_keys[0] += len(keys)
        return contains(keys)

    monkeypatch.setattr(bench.tier, "contains", counted)
    bench.add("b", prompt)
    bench.step()
    assert num_keys[0] <= 3 * 64


def test_a_state_that_is_stored_keeps_its_slot() -> None:
    """Also where its checkpoint goes meanwhile: the books are checked after each step."""
    bench = Bench(num_states=2, num_checkpoints=2)
    bench.add("a")
    bench.run(ends=False)
    bench.step()
    assert bench.tier.open
    slots = bench.scheduler.cache.states
    assert slots is not None
    assert slots.carried is not None
    (slot,) = slots.carried.stored_slots
    bench.scheduler.cache.prefix.clear()
    bench.scheduler.stats()  # sweeps
    assert slots.carried.orphans == [slot]
    for number in range(4):
        bench.add(f"other {number}", tuple(range(100 * number, 100 * number + 18)))
        bench.run(ends=False)
        assert slots.carried.orphans == [slot]
    bench.tier.end()
    bench.run()
    bench.step()
    assert not slots.carried.orphans
