"""`check_integrity` finds each way in which the books can be wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.cache.cache_bench import Bench
from tests.fakes.integrity import free_ids


def made() -> Bench:
    bench = Bench(num_blocks=24, windows=(None, 9))
    bench.run(tuple(range(14)))
    bench.run((*range(14), 50))
    table, _ = bench.run(tuple(range(70, 90)))
    bench.release(table)
    bench.check()
    return bench


def leak(bench: Bench) -> None:
    bench.cache.pool.take()


def lost_reference(bench: Bench) -> None:
    bench.cache.pool.ref_counts[bench.tables[0].rows[0][0]] -= 1


def held_by_nobody(bench: Bench) -> None:
    bench.cache.pool.share(bench.tables[0].rows[0][0])


def one_block_in_two_places(bench: Bench) -> None:
    table = bench.tables[0]
    table.rows[0][-1], table.rows[0][0] = table.rows[0][0], table.rows[0][-1]


def one_block_in_two_groups(bench: Bench) -> None:
    table = bench.tables[0]
    table.rows[1][-1] = table.rows[0][-1]


def block_free_twice(bench: Bench) -> None:
    pool = bench.cache.pool
    blocks = [pool.take(), pool.take()]
    for block_id in blocks:
        pool.drop(block_id)
    pool.free_ids[-1] = pool.free_ids[-2]


def free_block_in_use(bench: Bench) -> None:
    bench.cache.pool.ref_counts[free_ids(bench.cache.pool)[0]] = 1


def wrong_idle_count(bench: Bench) -> None:
    bench.cache.prefix.num_idle += 1


def child_without_parent(bench: Bench) -> None:
    node = next(n for n in bench.cache.prefix.nodes.values() if n.parent is not None)
    assert node.parent is not None
    node.unlink()


def wrong_owner(bench: Bench) -> None:
    prefix = bench.cache.prefix
    node = next(iter(prefix.nodes.values()))
    prefix.node_of[node.block_ids[0]] = None


def table_off_its_path(bench: Bench) -> None:
    table = bench.tables[0]
    assert table.tip is not None
    table.tip = table.tip.parent


def rows_of_different_length(bench: Bench) -> None:
    bench.tables[0].rows[1].append(-1)


def hole_in_a_full_group(bench: Bench) -> None:
    bench.tables[0].first_rows[0] = 1


def row_sent_but_not_held(bench: Bench) -> None:
    bench.tables[0].num_sent_rows += 1


def used_below_idle(bench: Bench) -> None:
    bench.tables[0].tip = None
    bench.tables[0].num_published = 0
    table = bench.tables[0]
    prefix, pool = bench.cache.prefix, bench.cache.pool
    block_id = table.rows[0][0]
    bench.tables[1].rows[0][0] = table.rows[0][0] = pool.take()
    pool.share(table.rows[0][0])
    pool.drop(block_id)
    pool.drop(block_id)
    prefix.mark_idle([block_id])
    bench.tables[1].tip, bench.tables[1].num_published = None, 0


FAULTS: list[Callable[[Bench], None]] = [
    leak,
    lost_reference,
    held_by_nobody,
    one_block_in_two_places,
    one_block_in_two_groups,
    block_free_twice,
    free_block_in_use,
    wrong_idle_count,
    child_without_parent,
    wrong_owner,
    table_off_its_path,
    rows_of_different_length,
    hole_in_a_full_group,
    row_sent_but_not_held,
    used_below_idle,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_fault_is_found(fault: Callable[[Bench], None]) -> None:
    bench = made()
    fault(bench)
    with pytest.raises(AssertionError):
        bench.check()
