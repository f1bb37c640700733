"""Eviction order, events, and the exchange of blocks that two sequences computed alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from tests.cache.cache_bench import Bench

from quire.cache import prefix_cache
from quire.cache.blocks import BlockTable, Node
from quire.cache.events import BlockRemoved, BlockStored, CacheEvent, EventBuffer, EventsLost
from quire.cache.prefix_cache import IdleQueue, PrefixCache


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
    queue, parent, other = IdleQueue(), *(Node(b"", None, b"", (0,), 0) for _ in range(2))
    child = Node(b"", parent, b"", (0,), 0)
    child.link()
    for node in (parent, child, other):
        queue.add(node, num_nodes=3)
    assert queue.pop() is child
    child.unlink()
    queue.lost_children(parent)
    assert [queue.pop(), queue.pop(), queue.pop()] == [parent, other, None]


class Unwalkable(dict[bytes, Node]):
    """A tree that must not be gone through."""

    def __iter__(self) -> Iterator[bytes]:
        raise AssertionError("the whole tree was looked at")

    values = items = keys = __iter__  # type: ignore[assignment]


def test_withdrawal_looks_at_what_it_removes_alone() -> None:
    bench = Bench(num_blocks=64)
    bench.run(tuple(range(8)))
    kept, _ = bench.run((*range(8), 20, 21, 22, 23))
    gone, _ = bench.run((*range(8), 30, 31, 32, 33, 34, 35, 36, 37))
    prefix, top, rest = bench.cache.prefix, gone.tip, kept.tip
    assert top is not None
    assert top.parent is not None
    prefix.nodes = Unwalkable(prefix.nodes)
    prefix.withdraw([top, top.parent])
    prefix.nodes = dict(dict.items(prefix.nodes))
    bench.check()
    assert not top.alive
    assert rest is not None
    assert rest.alive
    assert len(prefix.nodes) == 3


@pytest.mark.parametrize("seed", range(20))
def test_withdrawn_paths_take_their_subtrees_along(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(num_blocks=256, windows=rng.choice([(None,), (None, 5), (5,)]))
    for _ in range(25):
        table, _ = bench.run(tuple(rng.randrange(2) for _ in range(rng.randrange(1, 24))))
        if rng.random() < 0.6:
            bench.release(table)
    prefix = bench.cache.prefix
    nodes = list(prefix.nodes.values())
    chosen = rng.sample(nodes, min(len(nodes), 3))
    doomed = {n.block_hash for n in nodes if any(top in path_of(n) for top in chosen)}
    prefix.withdraw(chosen)
    bench.check()
    left = {n.block_hash for n in nodes} - set(prefix.nodes)
    # Where all groups slide, parents without blocks go with their last child.
    assert left >= doomed
    assert left == doomed or not bench.cache.windows.num_full


def path_of(node: Node | None) -> list[Node]:
    path = []
    while node is not None:
        path.append(node)
        node = node.parent
    return path


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 20))]
)
@pytest.mark.parametrize("windows", [(None,), (None, 5), (5,)], ids=str)
def test_a_cleared_tree_is_taken_apart_between_steps(
    seed: int, windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hits, publications, evictions and withdrawals go on meanwhile, and the books are right after every step."""
    rng = random.Random(seed)
    monkeypatch.setattr(prefix_cache, "SLICE", 2)
    events = EventBuffer(capacity=10_000)
    bench = Bench(num_blocks=40, windows=windows, events=events)
    prefix, mirror = bench.cache.prefix, dict[bytes, set[int]]()
    for _ in range(60):
        if rng.random() < 0.15:
            prefix.clear()
            assert not prefix.nodes
            bench.check()
        prompt = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 20)))
        before = set(prefix.nodes)
        with bench.step():
            done = bench.admit(prompt)
        if done is not None:
            chain = done[0].chain
            assert done[1] == 0 or chain[0] in before, "only what was published since is hit"
            bench.cache.settle(done[0], prompt, min(len(prompt), done[0].capacity))
        bench.apply()
        if rng.random() < 0.1 and prefix.nodes:
            prefix.withdraw([rng.choice(list(prefix.nodes.values()))])
            bench.check()
        while bench.tables and (done is None or rng.random() < 0.6):
            bench.release(rng.choice(bench.tables))
            done = done or (None, 0)  # type: ignore[assignment]
        follow(mirror, prefix, events)
        assert {h: g for h, g in mirror.items() if g} == hashes_of(bench)
    for table in list(bench.tables):
        bench.release(table)
    prefix.clear()
    while prefix.take_apart():
        pass
    bench.check()
    assert bench.cache.pool.num_free == 40


def follow(mirror: dict[bytes, set[int]], prefix: PrefixCache, events: EventBuffer) -> None:
    """Read the events as a gateway does: after lost ones it starts from a snapshot."""
    drained: list[CacheEvent] = events.drain()
    if drained and isinstance(drained[0], EventsLost):
        mirror.clear()
        drained = list(prefix.snapshot())
    for event in drained:
        if isinstance(event, BlockStored):
            mirror.setdefault(event.block_hash, set()).update(event.groups)
        else:
            assert isinstance(event, BlockRemoved)
            mirror[event.block_hash] -= set(event.groups)


def test_no_step_takes_more_than_a_slice_apart() -> None:
    bench = Bench(num_blocks=4096)
    bench.release(long_prompt(bench, 3500))
    prefix = bench.cache.prefix
    assert prefix.clear() == 3500, "all can be had again at once"
    nums = [bench.cache.pool.num_free]
    while prefix.cleared:
        with bench.step():
            assert bench.admit((1, 2)) is not None
        bench.apply()
        bench.release(bench.tables[0])
        nums.append(bench.cache.pool.num_free)
    assert nums[0] == 4096 - 3500 + prefix_cache.SLICE
    assert max(b - a for a, b in pairwise(nums)) <= prefix_cache.SLICE


def test_a_long_chain_without_blocks_goes_with_its_last_child() -> None:
    """Where all groups slide the inner nodes of a long answer lose their blocks to others."""
    bench = Bench(num_blocks=4000, windows=(4,))
    table, prefix = long_prompt(bench, 3000), bench.cache.prefix
    bench.cache.slide(table, 4 * 3000 - 1)
    prefix.evict(prefix.num_idle)
    bench.check()
    assert sum(not node.has_blocks for node in prefix.nodes.values()) == 2999
    prefix.withdraw([n for n in prefix.nodes.values() if n.first_child is None])
    bench.check()
    assert not prefix.nodes


def long_prompt(bench: Bench, num_blocks: int) -> BlockTable:
    """Compute a prompt of so many blocks in one step."""
    with bench.step():
        done = bench.admit(tuple(range(4 * num_blocks)), budget=4 * num_blocks)
    assert done is not None
    bench.apply()
    return done[0]


def test_places_are_swept_a_few_at_a_time() -> None:
    queue, nodes = IdleQueue(), [Node(b"", None, b"", (0,), 0) for _ in range(1000)]
    most = 0
    for node in nodes * 5:
        before = len(queue.entries) + len(queue.swept)
        queue.add(node, num_nodes=len(nodes))
        after = len(queue.entries) + len(queue.swept)
        most = max(most, before - after)
        assert after <= 2 * len(nodes) + 65
    assert most <= 8
    assert [queue.pop() for _ in nodes] == nodes


def test_links_cost_16_bytes_a_block() -> None:
    """Three pointers in place of a count of children; without them a node had ten fields, 112 bytes in CPython 3.11."""
    assert len(Node.__slots__) == 10 + 2  # type: ignore[attr-defined]
