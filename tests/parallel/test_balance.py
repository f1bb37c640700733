"""Placements of experts: even loads, every expert somewhere, few moves; and what each rank reads at the start."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from quire.errors import ConfigError
from quire.parallel.balance import balance, copies, imbalance, keep, moves, pack, rank_loads
from quire.parallel.topology import Topology

# The layer of the example in EPLB's README: 12 experts, 16 slots, 4 groups, 2 nodes of 4 ranks.
LOADS = [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
PLACED = [[5, 6], [5, 7], [8, 4], [3, 4], [10, 9], [10, 2], [0, 1], [11, 1]]


def skewed(num_experts: int, seed: int) -> list[int]:
    """Loads as of a power law."""
    rng = random.Random(seed)
    found = [int(10_000 / (rank + 1)) for rank in range(num_experts)]
    rng.shuffle(found)
    return found


def test_the_published_example_is_placed_as_published() -> None:
    found = balance(LOADS, 16, 8, num_groups=4, num_nodes=2)
    ranks = [sorted(found[2 * r : 2 * r + 2]) for r in range(8)]
    nodes = [{frozenset(pair) for pair in ranks[:4]}, {frozenset(pair) for pair in ranks[4:]}]
    published = [{frozenset(pair) for pair in PLACED[:4]}, {frozenset(pair) for pair in PLACED[4:]}]
    assert nodes in (published, published[::-1])


def test_packs_are_equally_large_and_even() -> None:
    weights = [9, 1, 1, 1, 8, 2, 7, 1]
    packs = pack(weights, 2)
    assert [len(items) for items in packs] == [4, 4]
    assert sorted(item for items in packs for item in items) == list(range(8))
    assert [sum(weights[item] for item in items) for items in packs] == [13, 17]


def test_the_busiest_expert_gets_the_copies() -> None:
    assert copies([100, 10, 10, 30], 7) == [4, 1, 1, 1]
    assert copies([0, 0, 0], 4) == [2, 1, 1]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("num_ranks", "extra"), [(2, 0), (2, 8), (4, 16), (8, 8)])
def test_skewed_loads_become_even(seed: int, num_ranks: int, extra: int) -> None:
    loads, num_slots = skewed(64, seed), 64 + extra
    first = tuple(
        e for r in range(num_ranks) for e in Topology(ep=num_ranks, redundant_experts=extra).experts_of(64, r)
    )
    assert len(first) == num_slots
    placed = balance(loads, num_slots, num_ranks)
    assert set(placed) == set(range(64))
    before, after = (imbalance(rank_loads(p, loads, num_ranks)) for p in (first, placed))
    assert after <= max(before, 1.01)
    if extra >= 8:
        assert after < 1.1
    assert sum(rank_loads(placed, loads, num_ranks)) == pytest.approx(sum(loads))


@pytest.mark.parametrize("seed", range(8))
def test_groups_stay_on_one_node(seed: int) -> None:
    placed = balance(skewed(32, seed), 40, 4, num_groups=8, num_nodes=2)
    nodes = placed[:20], placed[20:]
    groups = [{expert // 4 for expert in node} for node in nodes]
    assert [len(each) for each in groups] == [4, 4]
    assert not groups[0] & groups[1]
    assert set(placed) == set(range(32))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_moves_make_the_new_placement(seed: int, num_nodes: int) -> None:
    old = balance(skewed(16, seed), 24, 4, num_nodes=num_nodes, num_groups=num_nodes)
    wanted = balance(skewed(16, seed + 100), 24, 4, num_nodes=num_nodes, num_groups=num_nodes)
    new = keep(old, wanted, 4, num_nodes)
    for node in range(num_nodes):  # ranks are exchanged within a node
        slots = slice(node * 24 // num_nodes, (node + 1) * 24 // num_nodes)
        assert Counter(new[slots]) == Counter(wanted[slots])
    todo = moves(old, new, 4)
    slots_after = list(old)
    for source, target in todo:
        slots_after[target] = old[source]
    assert tuple(slots_after) == new
    assert len(todo) <= sum(a != b for a, b in zip(old, wanted, strict=True))
    assert keep(old, old, 4, num_nodes) == old
    assert not moves(old, old, 4)


def test_a_copy_on_the_same_rank_is_taken() -> None:
    assert moves((0, 1, 2, 1), (0, 1, 1, 1), 2) == [(3, 2)]


@pytest.mark.parametrize("case", [(8, 2, 0, 4), (5, 2, 0, 3), (8, 2, 3, 6), (7, 3, 2, 3)])
def test_every_expert_is_on_some_rank_at_the_start(case: tuple[int, int, int, int]) -> None:
    num_experts, ranks, extra, each = case
    topology = Topology(ep=ranks, redundant_experts=extra)
    held = [topology.experts_of(num_experts, rank) for rank in range(ranks)]
    assert {len(part) for part in held} == {each}
    assert set().union(*held) == set(range(num_experts))


@pytest.mark.parametrize(
    ("ranks", "extra", "text"), [(9, 0, "at most 8 ranks"), (2, 9, "at most 8 are allowed")]
)
def test_too_many_ranks_or_copies_are_refused(ranks: int, extra: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Topology(ep=ranks, redundant_experts=extra).experts_of(8, 0)
