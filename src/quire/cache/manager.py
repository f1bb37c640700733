"""`CacheManager`: what the scheduler asks of the cache — match, admit, allocate, fork, slide, release.

Publishing and withdrawing are in `publisher`, reference counts and steps in `references`. `reclaim` puts the books
right while nothing runs: a block that is neither in the prefix tree nor free comes of a bug, which must not cost memory
until the next restart.

    fork of a sequence at token 40, block size 16       a full hit of 32 tokens: the last one is computed again

    source   │ 5 │ 8 │ 2▒ │      rows 0, 1 shared       tree     │ 5 │ 8 │
    target   │ 5 │ 8 │ 9▒ │      move 2 → 9             table    │ 5 │ 9 │  move 8 → 9, then 31 is written into 9
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from quire.cache.blocks import NO_BLOCK, BlockPool, BlockTable, Windows
from quire.cache.events import BlockRemoved, EventBuffer
from quire.cache.prefix_cache import Hit, PrefixCache, extend_chain, root_hash
from quire.cache.references import Publisher, References
from quire.config import CacheConfig

if TYPE_CHECKING:
    from quire.cache.states import StateSlots


class Admitted(NamedTuple):
    """A sequence was admitted: ``num_cached`` tokens need no computation, ``num_scheduled`` have their blocks."""

    num_cached: int
    num_scheduled: int


class CacheManager:
    """Block tables, prefix tree and pool of one engine."""

    def __init__(self, config: CacheConfig, events: EventBuffer | None = None) -> None:
        self.config = config
        self.block_size = config.block_size
        self.windows = Windows(config.windows, config.block_size)
        self.pool = BlockPool(config.num_blocks)
        self.prefix = PrefixCache(self.pool, config.block_size, self.windows, events)
        self.references = References(self.pool, self.prefix)
        self.publisher = Publisher(self.references, config.block_size)
        self._num_groups = self.windows.num_groups
        # `policies.states` sets it for a model with recurrent layers.
        self.states: StateSlots | None = None

    def new_table(self, *, adapter: str = "", cache_salt: str = "") -> BlockTable:
        """Return an empty table whose blocks are shared within one adapter and salt only."""
        root = root_hash(self.config.model_key, self.block_size, adapter=adapter, cache_salt=cache_salt)
        return BlockTable(
            self._num_groups, root, self.block_size, publishes=self.config.enable_prefix_caching
        )

    def match(self, table: BlockTable, token_ids: Sequence[int], step: int = -1) -> Hit:
        """Find what the tree has of ``token_ids``, without taking it. ``step``: see `PrefixCache.find`."""
        if not (self.config.enable_prefix_caching and table.reads_prefix):
            return Hit([], 0, (0,) * self._num_groups, False)
        extend_chain(table.chain, table.root, token_ids, self.block_size, table.spans)
        if self.states is not None:
            return self.states.find(table.chain, len(token_ids), step)
        return self.prefix.find(table.chain, len(token_ids), step)

    def miss_of(self, table: BlockTable, num_prompt: int, num_cached: int) -> str:
        """Say why no more than ``num_cached`` tokens of a prompt came from the tree; empty where none could."""
        if not self.config.enable_prefix_caching:
            return "disabled"
        if not table.reads_prefix:
            return "whole prompt wanted"
        if num_cached >= min(num_prompt // self.block_size * self.block_size, num_prompt - 1):
            return "" if num_cached else "shorter than a block"
        return "not in the cache from there on" if num_cached else "not in the cache"

    def admit(
        self,
        table: BlockTable,
        token_ids: Sequence[int],
        target: int,
        budget: int,
        *,
        uncut: bool,
        num_held: int = 0,
    ) -> Admitted | None:
        """Give ``table`` its cached blocks and those of its first chunk, or return None and change nothing.

        The chunk ends at ``target`` or after ``budget`` tokens (``uncut``: at ``target`` or not at all). Blocks for
        all of ``token_ids`` must be available beside ``num_held``, so that an admitted sequence is not preempted at
        once.
        """
        if self.states is not None and not self.states.has_room:
            return None
        step = self.references.planning.step
        hit = self.match(table, token_ids, step)
        end = self._admissible_end(hit, len(token_ids), target, budget, num_held, uncut=uncut)
        if end is None and hit.copy_tail:
            # No room for the copy beside its source: compute the last block again.
            hit = self.prefix.find(table.chain[: len(hit.nodes) - 1], len(token_ids), step)
            end = self._admissible_end(hit, len(token_ids), target, budget, num_held, uncut=uncut)
        if end is None:
            return None
        self.fill(table, hit, -(-end // self.block_size) - len(hit.nodes))
        if self.states is not None:
            self.states.start(table, hit, len(token_ids))
        return Admitted(hit.num_tokens, end - hit.num_tokens)

    def allocate(self, table: BlockTable, end: int) -> bool:
        """Make room for tokens up to ``end`` (exclusive), or return False and change nothing."""
        if end > table.capacity:
            num_rows = -(-end // self.block_size) - table.num_rows
            if num_rows * self._num_groups > self.references.num_available:
                return False
            self._grow(table, num_rows)
        return True

    def reachable_end(self, table: BlockTable) -> int:
        """Return the number of tokens that ``table`` could grow to with what is available."""
        return (table.num_rows + self.references.num_available // self._num_groups) * self.block_size

    def fork(self, source: BlockTable, target: BlockTable, num_tokens: int) -> bool:
        """Let ``target`` share the first ``num_tokens`` of ``source``; a partial last block is copied by a move.

        Returns False, with nothing changed, where the copies do not fit.
        """
        full_rows, partial = divmod(num_tokens, self.block_size)
        assert target.num_rows == 0
        assert source.num_published <= full_rows
        if partial and self._num_groups > self.references.num_available:
            return False
        if self.states is not None and not self.states.fork(source, target, num_tokens):
            return False
        target.reads = source.reads | {s for s in self.references.steps if s <= source.last_step}
        for rows, shared in zip(target.rows, source.rows, strict=True):
            for block_id in shared[:full_rows]:
                if block_id != NO_BLOCK:
                    self.references.share(block_id)
                rows.append(block_id)
            if partial:
                rows.append(self.references.copy(target, shared[full_rows]))
        target.first_rows = list(source.first_rows)
        target.chain = source.chain[:full_rows]
        target.num_published, target.tip = source.num_published, source.tip
        target.publishable = source.publishable
        return True

    def slide(self, table: BlockTable, position: int) -> None:
        """Give up the rows of sliding groups that no query at ``position`` or later can see."""
        first_rows = self.windows.first_rows(position)
        for group in self.windows.sliding:
            rows = table.rows[group]
            for row in range(table.first_rows[group], min(first_rows[group], len(rows))):
                self.references.drop(rows[row])
                rows[row] = NO_BLOCK
                table.first_rows[group] = row + 1

    def settle(self, table: BlockTable, token_ids: Sequence[int], end: int) -> None:
        """A step that brought ``table`` to ``end`` was applied: publish the full rows, drop rows that no query sees."""
        self.publisher.publish(table, token_ids, end, planned=False)
        if self.windows.sliding and end >= self.windows.next_slide(table.first_rows):
            self.slide(table, end)

    def next_event_at(self, table: BlockTable) -> int:
        """Return the token count at which ``table`` needs a block, fills one to be published, or can drop one.

        It is 0 while the worker does not know all rows.
        """
        num_rows = len(table.rows[0])
        if table.num_sent_rows < num_rows:
            return 0
        at = min(num_rows, table.num_published + 1) if table.publishable else num_rows
        at *= self.block_size
        return min(at, self.windows.next_slide(table.first_rows)) if self.windows.sliding else at

    def rollback(self, table: BlockTable, num_tokens: int) -> None:
        """Give up the blocks past token ``num_tokens``: what was computed there was rejected."""
        removed = table.truncate(-(-num_tokens // self.block_size))
        if removed:
            self.references.give_up(table, removed)

    def release(self, table: BlockTable) -> None:
        """Give up every block; those that a step in flight uses go when the last such step is applied."""
        self.references.give_up(table, table.block_ids())
        if self.states is not None:
            self.states.end(table)
        table.clear()

    def _admissible_end(
        self, hit: Hit, num_known: int, target: int, budget: int, num_held: int, *, uncut: bool
    ) -> int | None:
        """Return where the first chunk of a new sequence would end, or None where it cannot be admitted now."""
        todo = target - hit.num_tokens
        assert todo >= 0
        if uncut and todo > budget:
            return None
        end = hit.num_tokens + min(todo, budget)
        room = self.references.num_available - num_held - hit.num_idle(self.pool.ref_counts)
        room -= self._num_groups * hit.copy_tail
        room -= self.windows.num_full * (-(-num_known // self.block_size) - len(hit.nodes))
        if room < 0:
            return None
        if self.windows.sliding:
            reachable = (len(hit.nodes) + room // len(self.windows.sliding)) * self.block_size
            if reachable < end and (uncut or reachable <= hit.num_tokens):
                return None
            end = min(end, reachable)
        return end

    def fill(self, table: BlockTable, hit: Hit, num_rows: int) -> None:
        """Give an empty table the blocks of ``hit``, and ``num_rows`` rows behind them."""
        assert table.num_rows == 0
        num_hit_rows = len(hit.nodes)
        table.reads = {n.step for n in hit.nodes if n.step > self.references.applied_step}
        for group, first in enumerate(hit.first_rows):
            rows = table.rows[group]
            rows.extend([NO_BLOCK] * min(first, num_hit_rows))
            for node in hit.nodes[first:]:
                self.references.share(node.block_ids[group])
                rows.append(node.block_ids[group])
        if hit.copy_tail:
            for rows in table.rows:
                shared = rows[-1]
                rows[-1] = self.references.copy(table, shared)
                self.references.drop(shared)
        table.first_rows = list(hit.first_rows)
        table.num_published = num_hit_rows - hit.copy_tail
        table.tip = hit.nodes[table.num_published - 1] if table.num_published else None
        self._grow(table, num_rows)

    def _grow(self, table: BlockTable, num_rows: int) -> None:
        if num_rows > 0:
            ids = self.references.take_many(num_rows * self._num_groups)
            for group, rows in enumerate(table.rows):
                rows.extend(ids[group :: self._num_groups])


def reclaim(cache: CacheManager) -> int:
    """Put the books of ``cache`` right; return how many blocks were counted wrongly.

    Only while no sequence, step or transfer refers to blocks. Where the books are wrong, they begin anew, and the whole
    tree is forgotten: nothing says which of its blocks still have their content.
    """
    pool, prefix = cache.pool, cache.prefix
    assert not cache.references.steps
    assert not cache.references.transfers
    in_tree = [node is not None for node in prefix.node_of]
    num_wrong = sum(map(int.__ne__, pool.ref_counts, in_tree))
    num_lost = abs(pool.num_blocks - pool.num_free - prefix.num_blocks)
    if not num_wrong and not num_lost and pool.is_whole and prefix.num_idle == prefix.num_blocks:
        return 0
    if prefix.events is not None:
        for node in prefix.nodes.values():
            if node.has_blocks:
                prefix.events.add(BlockRemoved(node.block_hash, node.groups))
    fresh = CacheManager(cache.config, prefix.events)
    fresh.prefix.num_evicted = prefix.num_evicted
    fresh.references.applied_step = cache.references.applied_step
    cache.pool, cache.prefix = fresh.pool, fresh.prefix
    cache.references, cache.publisher = fresh.references, fresh.publisher
    if cache.states is not None:
        cache.states.forget(fresh.prefix, fresh.references)
    return max(num_wrong, num_lost, 1)
