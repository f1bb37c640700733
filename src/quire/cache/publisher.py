"""`Publisher`: puts full blocks of sequences into the prefix tree, and takes those of failed steps back.

Prompt blocks are published when they are planned: whoever is planned in the same step or later may read them, since
K/V of every row of a step is stored before attention reads. Generated blocks are published when they are applied.
A reader of a block whose step is in flight notes that step in `BlockTable.reads`; if it fails, the reader starts again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.cache.block_hash import extend_chain
from quire.cache.block_table import BlockTable
from quire.cache.node import NO_BLOCK, Node
from quire.cache.references import References


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
            extend_chain(chain, table.root, token_ids, self._block_size)
        if table.tip is not None and not table.tip.alive:
            # Only whoever holds all blocks above may add below, or idle blocks could not be evicted.
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

        Whoever has one of them in its `BlockTable.reads` must start again.
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
            table.sent_rows[group] = min(table.sent_rows[group], row)
            table.unsent = True
        if node.step > references.applied_step:
            table.reads.add(node.step)
