"""`References`: which owner holds which block, and when it is freed. `Publisher`: which blocks the prefix tree has.

a table holds its blocks        until it gives them up; if a step in flight uses it, until that step is applied
a step holds                    both ends of its moves, and what tables gave up while it was in flight
a transfer holds                its blocks, from its start to its `TransferDone`, whatever becomes of its sequence
the tree holds                  published blocks, until they are evicted or withdrawn

Prompt blocks are published when they are planned: a sequence planned in the same step or later may read them, since
K/V of every token of a step is stored before attention reads. Generated blocks are published when they are applied,
loaded ones when their transfer ends.
A reader of a block whose step is in flight notes that step in `BlockTable.reads`; if it fails, the reader starts again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from quire.cache.blocks import NO_BLOCK, BlockPool, BlockTable, Node
from quire.cache.prefix_cache import PrefixCache, extend_chain
from quire.step import KvMove, StateMove


@dataclass(slots=True)
class StepBlocks:
    """What one step in flight refers to."""

    step: int
    block_ids: list[int] = field(default_factory=list)  # one reference each
    moves: list[KvMove] = field(default_factory=list)
    state_moves: list[StateMove] = field(default_factory=list)
    # By this step, before it was computed.
    published: list[tuple[BlockTable, Node]] = field(default_factory=list)


@dataclass(slots=True)
class TransferBlocks:
    """What one transfer refers to: a table of its own that a load fills, or the blocks that a store reads."""

    block_ids: list[int]  # one reference each, last rows first
    table: BlockTable | None = None
    token_ids: Sequence[int] = ()  # tokens of the rows of ``table``
    num_hit_rows: int = 0  # rows found in the prefix tree


class References:
    """Counts references to the blocks of ``pool``, with what the tree and the steps in flight need to know."""

    def __init__(self, pool: BlockPool, prefix: PrefixCache) -> None:
        self.pool = pool
        self.prefix = prefix
        self.steps: dict[int, StepBlocks] = {}  # in flight or being planned, oldest first
        self.transfers: dict[int, TransferBlocks] = {}  # open transfers, by transfer id
        self.applied_step = -1
        self._planning: StepBlocks | None = None

    @property
    def num_available(self) -> int:
        """Blocks that can be had now: free, or idle in the prefix tree."""
        return self.pool.num_free + self.prefix.num_idle

    @property
    def num_coming(self) -> int:
        """References that steps in flight will give up; at most that many blocks become available by themselves."""
        return sum(len(s.block_ids) for s in self.steps.values())

    @property
    def planning(self) -> StepBlocks:
        """The step being planned."""
        assert self._planning is not None, "only while a step is planned"
        return self._planning

    def open_step(self, step: int) -> StepBlocks:
        """Start planning ``step``: moves and publications from now on are its."""
        assert self._planning is None
        self.prefix.take_apart()
        self._planning = self.steps[step] = StepBlocks(step)
        return self._planning

    def end_planning(self, *, empty: bool) -> None:
        """The plan is made. An empty step never was."""
        record = self.planning
        if empty:
            assert not record.block_ids
            assert not record.published
            del self.steps[record.step]
        self._planning = None

    def close_step(self, step: int) -> None:
        """The step was applied: what it held goes."""
        record = self.steps.pop(step)
        assert step > self.applied_step
        self.applied_step = step
        self.drop_all(record.block_ids)

    def in_flight(self, table: BlockTable) -> bool:
        """Tell whether a step that is not applied yet uses ``table``."""
        return table.last_step > self.applied_step

    def take_many(self, count: int) -> list[int]:
        """Return blocks with one reference each; what has to be evicted for them goes at once."""
        missing = count - self.pool.num_free
        if missing > 0:
            self.prefix.evict(missing)
        return self.pool.take_many(count)

    def share(self, block_id: int) -> None:
        """Add a reference to a block in use or in the tree."""
        if self.pool.share(block_id) == 2 and self.prefix.node_of[block_id] is not None:
            self.prefix.mark_used(block_id)

    def drop(self, block_id: int) -> None:
        """Give up a reference that nothing in flight needs."""
        self.drop_all((block_id,))

    def drop_all(self, block_ids: Iterable[int]) -> None:
        """`drop` each, in this order."""
        self.prefix.mark_idle(self.pool.drop_all(block_ids))

    def give_up(self, table: BlockTable, block_ids: Iterable[int]) -> None:
        """Take over ``table``'s references; they go when the last step in flight that uses the table is applied."""
        if self.in_flight(table):
            self.steps[table.last_step].block_ids.extend(block_ids)
        else:
            self.drop_all(block_ids)

    def copy(self, table: BlockTable, source: int) -> int:
        """Take a block for ``table`` and plan the move that fills it from ``source``; the step holds both ends."""
        step = self.planning
        self.share(source)
        target = self.take_many(1)[0]
        self.share(target)
        step.block_ids += (source, target)
        step.moves.append(KvMove(source, target))
        table.last_step = step.step
        table.reads.add(step.step)
        return target


class Publisher:
    """The only writer of the tree. One per engine."""

    def __init__(self, references: References, block_size: int) -> None:
        self._references = references
        self._prefix = references.prefix
        self._block_size = block_size

    def publish(self, table: BlockTable, token_ids: Sequence[int], end: int, *, planned: bool) -> None:
        """Put the full rows of ``table`` below token ``end`` into the tree.

        ``planned``: the step being planned computes them; a row that another sequence published already is left to
        the apply of this step. Otherwise they are computed, and such a row is exchanged for the published one.
        """
        num_rows = end // self._block_size
        if num_rows <= table.num_published or not table.publishable:
            return
        chain, find = table.chain, self._prefix.nodes.get
        if len(chain) < num_rows:
            extend_chain(chain, table.root, token_ids, self._block_size, table.spans)
        if table.tip is not None and not self._prefix.has(table.tip):
            # Only a holder of all blocks above may add below, or idle blocks could not be evicted.
            table.publishable = False
            return
        row = table.num_published
        while (node := find(chain[row])) is not None:
            if planned:
                return
            self._merge(table, row, node)
            table.tip = node
            table.num_published = row = row + 1
            if row == num_rows:
                return
        self._insert(table, num_rows, token_ids, planned=planned)

    def withdraw(self, failed: Iterable[BlockTable], step: int) -> set[int]:
        """Take back what ``failed`` tables published in ``step`` and later; return the steps not to be trusted.

        A sequence with one of them in its `BlockTable.reads` must start again.
        """
        tables = set(failed)
        distrusted = {step}
        withdrawn = []
        for record in self._references.steps.values():
            if record.step < step:
                continue
            for table, node in record.published:
                if table in tables:
                    withdrawn.append(node)
                    distrusted.add(record.step)
        self._prefix.withdraw(withdrawn)
        return distrusted

    def _insert(self, table: BlockTable, end: int, token_ids: Sequence[int], *, planned: bool) -> None:
        """Put rows up to ``end`` into the tree: the first is not there, so none is (a node's ancestors are)."""
        references, prefix, size = self._references, self._prefix, self._block_size
        step = references.planning.step if planned else references.applied_step
        first, node = table.num_published, table.tip
        parent_hash = table.root if node is None else node.block_hash
        shown: Sequence[int] = ()
        for row in range(first, end):
            block_ids = tuple([rows[row] for rows in table.rows])
            if prefix.events is not None:
                shown = token_ids[row * size : (row + 1) * size]
            block_hash = table.chain[row]
            node = prefix.insert(block_hash, node, parent_hash, block_ids, step, shown)
            parent_hash = block_hash
            if planned:
                references.planning.published.append((table, node))
        table.tip = node
        table.num_published = end

    def _merge(self, table: BlockTable, row: int, node: Node) -> None:
        """Another sequence published the same row: use its blocks and give up the own ones."""
        references = self._references
        for group, rows in enumerate(table.rows):
            own, published = rows[row], node.block_ids[group]
            if own in (NO_BLOCK, published):
                continue
            if published == NO_BLOCK:
                self._prefix.fill(node, group, own)
                continue
            references.share(published)
            rows[row] = published
            references.give_up(table, (own,))
            table.num_sent_rows = min(table.num_sent_rows, row)
        if node.step > references.applied_step:
            table.reads.add(node.step)
