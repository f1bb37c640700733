"""`check_integrity`: the books of a scheduler and its cache against each other. Tests call it after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from quire.cache.blocks import NO_BLOCK, BlockPool, BlockTable, Node
from quire.cache.manager import CacheManager
from quire.cache.prefix_cache import PrefixCache
from quire.cache.states import StateSlots
from quire.scheduler.policies.adapters import AdapterSlots
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import SequenceState
from quire.scheduler.state import SchedulerState


def check_integrity(scheduler: Scheduler) -> None:
    """Raise AssertionError where the books disagree. It looks at every block."""
    state = scheduler.state
    check_cache(scheduler.cache, [seq.table for seq in state.sequences.values()])
    if state.policies.states is not None:
        _check_states(state.policies.states.slots, state)
    if state.policies.adapters is not None:
        _check_adapters(state.policies.adapters.slots, state)
    assert len(state.running) + len(state.waiting) <= len(state.sequences)
    loading = [seq for seq in state.sequences.values() if seq.state is SequenceState.LOADING_KV]
    transfers = state.policies.transfers
    assert set(loading) == set(() if transfers is None else transfers.loading)
    assert transfers is None or set(transfers.loading.values()) <= set(scheduler.cache.references.transfers)
    for seq in state.sequences.values():
        # Else a token would be planned without a block, or a full block not published.
        if seq.next_event_at:
            assert seq.state is SequenceState.RUNNING
            assert seq.told_first
            assert seq.next_event_at <= seq.max_planned
            next_event_at = scheduler.cache.next_event_at(seq.table)
            assert seq.num_planned >= seq.next_event_at or seq.next_event_at <= next_event_at


def _check_states(slots: StateSlots, state: SchedulerState) -> None:
    """Each slot is free, live, a checkpoint's, or a step's in flight; each sequence that runs has one."""
    assert set(slots.live) == {seq.table for seq in state.running}
    live = [live.slot for live in slots.live.values()]
    saved = [save.slot for record in slots.steps.values() for save in record.saves]
    given_up = [slot for record in slots.steps.values() for slot in record.given_up]
    kept = [checkpoint.slot for checkpoint in slots.checkpoints.values()]
    carried = [] if slots.carried is None else [*slots.carried.loading.values(), *slots.carried.orphans]
    assert sorted([*slots.free, *live, *saved, *given_up, *kept, *carried]) == list(range(slots.num_slots))
    if slots.carried is not None:
        transfers = state.cache.references.transfers
        assert {*slots.carried.loading, *slots.carried.storing} <= set(transfers), (
            "slots wait for what is over"
        )
        assert slots.carried.stored_slots <= {*kept, *slots.carried.orphans}
    assert set(slots.steps) <= set(state.cache.references.steps), "slots wait for a step that is over"
    size = state.cache.block_size
    for live_state in slots.live.values():
        assert all(place.num_tokens % size == 0 for place in live_state.places)


def _check_adapters(slots: AdapterSlots, state: SchedulerState) -> None:
    users = Counter(seq.group.request.adapter.key for seq in state.running if seq.group.request.adapter)
    assert users == slots.users, (users, slots.users)
    assert len(users) <= slots.num_slots
    held = sorted(slots.slots.values())
    assert sorted([*held, *slots.free_slots]) == list(range(1, slots.num_slots + 1)), (held, slots.free_slots)
    assert set(slots.slots) == set(slots.users) | set(slots.idle)
    assert not set(slots.users) & set(slots.idle)


def free_ids(pool: BlockPool) -> list[int]:
    """Return every free id of ``pool``."""
    return [*pool.free_ids, *range(pool.num_blocks - pool.num_untouched, pool.num_blocks)]


def check_cache(cache: CacheManager, tables: Sequence[BlockTable]) -> None:
    """Raise AssertionError unless counts, tree, tables and free list agree.

    ``tables`` are those of all sequences alive; every reference must belong to one of them, to the tree, or to a step
    or a transfer in flight.
    """
    tables = [*tables, *(t.table for t in cache.references.transfers.values() if t.table is not None)]
    _check_tables(cache, tables)
    _check_tree(cache)
    _check_counts(cache, tables)
    _check_free_list(cache)
    _check_evictable(cache)


def _check_counts(cache: CacheManager, tables: Sequence[BlockTable]) -> None:
    owners = [0] * (cache.pool.num_blocks + 1)  # the last one counts NO_BLOCK
    held = [b for record in cache.references.steps.values() for b in record.block_ids]
    held += [b for transfer in cache.references.transfers.values() for b in transfer.block_ids]
    rows = [b for table in tables for group in table.rows for b in group]
    tree = [b for node in _all_nodes(cache.prefix) for b in node.block_ids]
    for block_id in (*held, *rows, *tree):
        owners[block_id] += 1
    counts = cache.pool.ref_counts
    wrong = [b for b in range(cache.pool.num_blocks) if counts[b] != owners[b]]
    assert not wrong, f"block {wrong[0]}: {counts[wrong[0]]} references, {owners[wrong[0]]} owners"


def _check_free_list(cache: CacheManager) -> None:
    pool = cache.pool
    free = free_ids(pool)
    assert len(free) == len(set(free)) == pool.num_free
    assert all(pool.ref_counts[b] == 0 for b in free)
    assert sum(c == 0 for c in pool.ref_counts) == pool.num_free


def _check_tables(cache: CacheManager, tables: Sequence[BlockTable]) -> None:
    # Block id -> (group, row, root): no block serves two places, nor two namespaces (salts, adapters).
    seen: dict[int, tuple[int, int, bytes]] = {}
    for table in tables:
        assert len(table.rows) == cache.windows.num_groups
        assert len({len(rows) for rows in table.rows}) == 1, "groups have as many rows"
        assert table.num_sent_rows <= table.num_rows
        for group, rows in enumerate(table.rows):
            first = table.first_rows[group]
            assert first == 0 or cache.windows.windows[group] is not None
            assert rows[:first] == [NO_BLOCK] * first
            assert NO_BLOCK not in rows[first:]
            for row in range(first, len(rows)):
                here = (group, row, table.root)
                place = seen.setdefault(rows[row], here)
                assert place == here, (
                    f"block {rows[row]} is at {place[:2]} and at {here[:2]}, or in two namespaces"
                )
        _check_path(cache, table)


def _check_path(cache: CacheManager, table: BlockTable) -> None:
    """A sequence holds the full-group blocks of every node that it published or took over."""
    node, row = table.tip, table.num_published - 1
    if node is None:
        assert row == -1
        return
    if not node.alive:
        return
    while node is not None:
        assert node.alive
        assert node.block_hash == table.chain[row]
        for group, rows in enumerate(table.rows):
            if cache.windows.windows[group] is None:
                assert rows[row] == node.block_ids[group]
        node, row = node.parent, row - 1
    assert row == -1


def _all_nodes(prefix: PrefixCache) -> list[Node]:
    """Return the nodes of the tree, and those that were cleared and still hold blocks."""
    return [node for tree in (prefix.nodes, *prefix.cleared) for node in tree.values() if node.alive]


def _linked_children(node: Node) -> set[Node]:
    found, before, child = set[Node](), None, node.first_child
    while child is not None:
        assert child.prev_sibling is before
        assert child not in found
        found.add(child)
        before, child = child, child.next_sibling
    return found


def _check_tree(cache: CacheManager) -> None:
    prefix = cache.prefix
    num_blocks = num_idle = 0
    assert all(node.alive for node in prefix.nodes.values())
    assert all(node.block_hash == block_hash for block_hash, node in prefix.nodes.items())
    children = {node.parent: set[Node]() for node in _all_nodes(prefix)}
    for node in _all_nodes(prefix):
        children[node.parent].add(node)
    for node in _all_nodes(prefix):
        assert node.parent is None or node.parent.alive
        assert node.parent is None or prefix.has(node) == prefix.has(node.parent)
        assert _linked_children(node) == children.get(node, set())
        assert node.first_child or node.groups, "a node without blocks and children is of no use"
        used = 0
        for group, block_id in enumerate(node.block_ids):
            if block_id == NO_BLOCK:
                assert cache.windows.windows[group] is not None
                continue
            assert prefix.node_of[block_id] is node
            num_blocks += 1
            used += cache.pool.ref_counts[block_id] > 1
            num_idle += cache.pool.ref_counts[block_id] == 1
        assert node.num_used == used
    assert prefix.num_blocks == num_blocks == sum(n is not None for n in prefix.node_of)
    assert prefix.num_idle == num_idle


def _check_evictable(cache: CacheManager) -> None:
    """Idle blocks of full groups lie in subtrees without used ones, so that they can be evicted leaf by leaf."""
    counts, windows = cache.pool.ref_counts, cache.windows.windows
    used: set[Node] = set()
    for node in _all_nodes(cache.prefix):
        if any(b != NO_BLOCK and windows[g] is None and counts[b] > 1 for g, b in enumerate(node.block_ids)):
            used.add(node)
    for node in used:
        parent = node.parent
        assert parent is None or not cache.windows.num_full or parent in used
