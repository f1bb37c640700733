"""Rank numbers, groups and shares: every item has exactly one owner, whatever the sizes."""

from __future__ import annotations

import itertools

import pytest

from quire.errors import ConfigError
from quire.parallel.topology import AXES, Heads, Rank, Topology, share

SIZES = [Topology(tp, pp, ep, cp) for tp, pp, ep, cp in itertools.product((1, 2, 3), (1, 2), (1, 3), (1, 2))]


@pytest.mark.parametrize("topology", SIZES, ids=str)
def test_rank_numbers_and_coordinates_are_inverse(topology: Topology) -> None:
    found = [topology.coordinates(rank) for rank in range(topology.world_size)]
    assert [topology.rank_of(at) for at in found] == list(range(topology.world_size))
    assert len(set(found)) == topology.world_size


@pytest.mark.parametrize("topology", SIZES, ids=str)
def test_each_rank_is_in_one_group_per_axis(topology: Topology) -> None:
    for axis in AXES:
        groups = topology.groups(axis)
        assert sorted(itertools.chain(*groups)) == list(range(topology.world_size))
        assert {len(group) for group in groups} == {getattr(topology, axis)}
        for rank in range(topology.world_size):
            at = getattr(topology.coordinates(rank), axis)
            assert topology.group(rank, axis)[at] == rank


def test_tensor_parallel_ranks_are_next_to_each_other() -> None:
    topology = Topology(tp=2, pp=2)
    assert topology.groups("tp") == ((0, 1), (2, 3))
    assert topology.groups("pp") == ((0, 2), (1, 3))
    assert topology.coordinates(3) == Rank(tp=1, pp=1)


def test_stages_are_neighbours_and_the_last_answers() -> None:
    topology = Topology(tp=2, pp=3)
    assert topology.stage_neighbour(1, -1) is None
    assert topology.stage_neighbour(1, 1) == 3
    assert topology.stage_neighbour(3, -1) == 1
    assert topology.stage_neighbour(5, 1) is None
    assert topology.answering_rank == 4
    assert Topology().answering_rank == 0


@pytest.mark.parametrize("total", [1, 2, 7, 64, 65])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("unit", [1, 3, 32])
def test_shares_cover_all_in_order_and_in_units(total: int, parts: int, unit: int) -> None:
    found = [share(total, parts, index, unit) for index in range(parts)]
    assert list(itertools.chain(*found)) == list(range(total))
    assert all(part.start % unit == 0 for part in found if part)
    sizes = [-(-len(part) // unit) for part in found]
    assert max(sizes) - min(sizes) <= 1


def test_stages_take_equally_long() -> None:
    def sizes(pp: int, costs: list[float], head: float) -> list[int]:
        stages = [Topology(pp=pp).layers_of(costs, head, stage) for stage in range(pp)]
        assert [layer for stage in stages for layer in stage] == list(range(len(costs)))
        return [len(stage) for stage in stages]

    assert sizes(3, [1.0] * 32, 0.0) == [11, 10, 11]
    assert sizes(2, [60.8] * 16, 262.7) == [10, 6]  # Llama 3.2 1B
    assert sizes(2, [1.0] * 4, 100.0) == [3, 1]
    assert sizes(4, [1.0] * 4, 100.0) == [1, 1, 1, 1]
    assert sizes(2, [1.0, 1.0, 1.0, 5.0], 0.0) == [3, 1]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 8), (32, 1), (9, 3), (14, 2), (6, 6), (12, 3)])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_each_query_head_has_one_rank_with_its_kv_head(num_heads: int, num_kv_heads: int, tp: int) -> None:
    each = num_heads // num_kv_heads
    found = [Topology(tp).heads_of(num_heads, num_kv_heads, rank) for rank in range(tp)]
    assert list(itertools.chain(*(heads.queries for heads in found))) == list(range(num_heads))
    for heads in found:
        assert {query // each for query in heads.queries} == set(heads.kv)
        assert len(heads.queries) % len(heads.kv) == 0


def test_fewer_kv_heads_than_ranks_are_replicated() -> None:
    topology = Topology(tp=3)
    assert [topology.heads_of(8, 2, rank) for rank in range(3)] == [
        Heads(range(2), range(1)), Heads(range(2, 4), range(1)), Heads(range(4, 8), range(1, 2)),
    ]  # fmt: skip


def test_heads_of_a_quantization_group_stay_together() -> None:
    assert Topology(tp=2).heads_of(6, 6, 0, unit=2).queries == range(4)
    assert Topology(tp=2).heads_of(6, 3, 0, unit=4).queries == range(4)
    assert Topology(tp=2).heads_of(6, 1, 0, unit=2).queries == range(4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology(tp=0), "tensor_parallel_size = 0: it must be an integer of at least 1"),
        (lambda: Topology(pp=2.0), "pipeline_parallel_size = 2.0: it must be"),  # type: ignore[arg-type]
        (lambda: Topology(tp=64, pp=32), "makes 2048 ranks; at most 1024"),
        (
            lambda: Topology(pp=5).layers_of([1.0] * 4, 0.0, 0),
            "pipeline_parallel_size = 5: the model has 4 layers; at most 4",
        ),
        (
            lambda: Topology(ep=9).experts_of(8, 0),
            "tensor_parallel_size = 9 with enable_expert_parallel: the model has 8",
        ),
        (
            lambda: Topology(tp=5).heads_of(4, 2, 4),
            "tensor_parallel_size = 5: the model has 4 attention heads",
        ),
        (lambda: Topology(tp=2).heads_of(2, 2, 1, unit=2), "of which 2 each share a quantization group"),
    ],
)
def test_impossible_sizes_are_refused_by_name(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        make()
