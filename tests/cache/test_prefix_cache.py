"""Eviction order, events, and the exchange of blocks that two sequences computed alike."""

from __future__ import annotations

import random

from tests.cache.cache_bench import Bench

from quire.cache.block_table import Node
from quire.cache.events import BlockRemoved, BlockStored, EventBuffer, EventsLost
from quire.cache.prefix_cache import IdleQueue


def hashes_of(bench: Bench) -> dict[bytes, set[int]]:
    return {n.block_hash: set(n.groups) for n in bench.cache.prefix.nodes.values() if n.groups}


def test_leaves_go_first_and_least_recently_used_ones() -> None:
    bench = Bench(num_blocks=8)
    old, _ = bench.run(tuple(range(12)))  # 3 blocks
    new, _ = bench.run(tuple(range(50, 62)))  # 3 blocks
    chain_old, chain_new = list(old.chain), list(new.chain)
    bench.release(old)
    bench.release(new)
    table, _ = bench.run(tuple(range(80, 92)))  # needs 3; 2 are free
    assert [h in bench.cache.prefix.nodes for h in chain_old] == [True, True, False]
    assert all(h in bench.cache.prefix.nodes for h in chain_new)
    bench.release(table)
    used, cached = bench.run(tuple(range(8)))  # the old prefix is used again, and is the newest now
    assert cached == 7
    bench.release(used)
    bench.run(tuple(range(100, 112)))
    assert [h in bench.cache.prefix.nodes for h in chain_old] == [True, True, False]
    assert not all(h in bench.cache.prefix.nodes for h in chain_new)


def test_blocks_in_use_are_never_evicted() -> None:
    bench = Bench(num_blocks=5)
    held, _ = bench.run(tuple(range(12)))
    with bench.step():
        assert bench.admit(tuple(range(50, 62))) is None
    assert all(h in bench.cache.prefix.nodes for h in held.chain)


def test_a_used_block_stays_when_its_last_child_goes() -> None:
    bench = Bench(num_blocks=5)
    held, _ = bench.run((*range(8), 90))
    longer, _ = bench.run((*range(8), 50, 51, 52, 53, 54))
    bench.release(longer)
    bench.run(tuple(range(60, 68)))  # takes the idle child
    assert bench.cache.prefix.num_evicted == 1
    with bench.step():
        assert bench.admit((99, 98)) is None
    assert all(h in bench.cache.prefix.nodes for h in held.chain)


def test_two_that_computed_the_same_end_up_with_one() -> None:
    bench = Bench(caching=True)
    first, _ = bench.run((1, 2, 3))
    second, _ = bench.run((1, 2, 3))
    tokens = [1, 2, 3, 4]
    for table in (first, second):
        with bench.step():
            table.last_step = bench.next_step - 1
        bench.apply()
        bench.cache.settle(table, tokens, 4)
        bench.check()
    assert first.rows == second.rows
    assert second.take_unsent() == ((0,), ((first.rows[0][0],),))
    assert bench.cache.pool.num_free == 15


def test_a_copy_in_flight_is_given_up_only_when_its_step_is_applied() -> None:
    bench = Bench()
    first, _ = bench.run((1, 2, 3))
    second, _ = bench.run((1, 2, 3))
    bench.cache.settle(first, [1, 2, 3, 4], 4)
    with bench.step():
        second.last_step = bench.next_step - 1
    bench.cache.settle(second, [1, 2, 3, 4], 4)
    bench.check()
    assert bench.cache.pool.num_free == 14
    bench.apply()
    assert bench.cache.pool.num_free == 15


def test_events_mirror_the_tree() -> None:
    events = EventBuffer()
    bench = Bench(num_blocks=10, windows=(None, 5), events=events)
    mirror: dict[bytes, set[int]] = {}
    for start in (0, 0, 50, 0, 80, 50):
        table, _ = bench.run(tuple(range(start, start + 15)))
        bench.release(table)
        for event in events.drain():
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == 4
                mirror.setdefault(event.block_hash, set()).update(event.groups)
            else:
                assert isinstance(event, BlockRemoved)
                mirror[event.block_hash] -= set(event.groups)
        assert {h: g for h, g in mirror.items() if g} == hashes_of(bench)
    stored = list(bench.cache.prefix.snapshot())
    assert {e.block_hash: set(e.groups) for e in stored if e.groups} == hashes_of(bench)
    seen = {table.root}
    for event in stored:
        assert event.parent_hash in seen, "parents come first"
        seen.add(event.block_hash)


def test_a_buffer_that_overflows_says_so() -> None:
    events = EventBuffer(capacity=2)
    bench = Bench(events=events)
    bench.run(tuple(range(16)))
    drained = events.drain()
    assert drained[0] == EventsLost(2)
    assert len(drained) == 3
    assert events.drain() == []


def test_tokens_are_not_kept_where_nobody_listens() -> None:
    bench = Bench()
    bench.run(tuple(range(8)))
    assert all(node.token_ids == () for node in bench.cache.prefix.nodes.values())


def test_clear_forgets_everything() -> None:
    bench = Bench(windows=(None, 5), num_blocks=32)
    table, _ = bench.run(tuple(range(20)))
    bench.cache.prefix.clear()
    bench.check()
    bench.release(table)
    assert bench.cache.pool.num_free == 32


def test_the_first_idle_node_comes_first() -> None:
    rng = random.Random(8)
    queue, nodes = IdleQueue(), [Node(b"", None, b"", (0,), 0) for _ in range(40)]
    idle: dict[Node, None] = {}  # in order of becoming so
    for _ in range(5000):
        node = rng.choice(nodes)
        if rng.random() < 0.2:
            first = queue.pop()
            assert first is next(iter(idle), None)
            idle.pop(first, None) if first else None
        elif rng.random() < 0.02:
            node.alive = False  # withdrawn
            idle.pop(node, None)
            nodes[nodes.index(node)] = Node(b"", None, b"", (0,), 0)
        elif node in idle:
            node.num_used = 1
            del idle[node]
        else:
            node.num_used = 0
            idle[node] = None
            queue.add(node, num_nodes=len(nodes))


def test_a_node_with_children_comes_after_the_last_of_them() -> None:
    queue, parent, child, other = IdleQueue(), *(Node(b"", None, b"", (0,), 0) for _ in range(3))
    parent.num_children = 1
    for node in (parent, child, other):
        queue.add(node, num_nodes=3)
    assert queue.pop() is child
    parent.num_children = 0
    queue.lost_children(parent)
    assert [queue.pop(), queue.pop(), queue.pop()] == [parent, other, None]
