"""`Node` of the prefix tree, and the queue of those that may be evicted."""

from __future__ import annotations

import heapq

NO_BLOCK = -1


class Node:
    """One block of tokens after one prefix."""

    __slots__ = (
        "alive",
        "block_hash",
        "block_ids",
        "children",
        "last_used",
        "num_used",
        "parent",
        "parent_hash",
        "step",
        "token_ids",
    )

    def __init__(
        self, block_hash: bytes, parent: Node | None, parent_hash: bytes, block_ids: list[int], step: int
    ) -> None:
        self.block_hash = block_hash
        self.parent = parent
        self.parent_hash = parent_hash  # the root's hash where there is no parent
        self.children: dict[Node, None] = {}  # in order of insertion, so that runs replay
        self.block_ids = block_ids  # per cache group, or NO_BLOCK
        self.num_used = 0  # how many of block_ids somebody beside the tree refers to
        self.last_used = 0
        self.step = step  # the step that computes the block: in flight for a prompt block just published
        self.alive = True  # in the tree
        self.token_ids: tuple[int, ...] = ()  # kept only where events are on

    @property
    def evictable(self) -> bool:
        return self.alive and not self.children and not self.num_used

    @property
    def has_blocks(self) -> bool:
        """Whether it has a block of any cache group."""
        return any(block_id != NO_BLOCK for block_id in self.block_ids)

    @property
    def groups(self) -> tuple[int, ...]:
        """The cache groups that this node has a block of."""
        return tuple(g for g, block_id in enumerate(self.block_ids) if block_id != NO_BLOCK)


class LeafQueue:
    """Evictable leaves, least recently used first: a heap whose stale entries are skipped, and swept when many."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._num_offers = 0  # breaks ties, so that runs replay

    def offer(self, node: Node, num_nodes: int) -> None:
        """Queue ``node`` if it is evictable. ``num_nodes`` (in the tree) tells when a sweep pays."""
        if not node.alive or node.children or node.num_used:  # `evictable`, spelled out: this is called often
            return
        if len(self._heap) > 2 * num_nodes + 64:
            self._heap = [e for e in self._heap if e[0] == e[2].last_used and e[2].evictable]
            heapq.heapify(self._heap)
        self._num_offers += 1
        heapq.heappush(self._heap, (node.last_used, self._num_offers, node))

    def pop(self) -> Node | None:
        """Return the leaf that was not used for the longest time, or None."""
        while self._heap:
            used, _, node = heapq.heappop(self._heap)
            if used == node.last_used and node.evictable:
                return node
        return None
