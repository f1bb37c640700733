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
        "last_used",
        "num_children",
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
        self.num_children = 0  # nodes whose parent it is
        self.block_ids = block_ids  # per cache group, or NO_BLOCK
        self.num_used = 0  # how many of block_ids somebody beside the tree refers to
        self.last_used = 0
        self.step = step  # the step that computes the block: in flight for a prompt block just published
        self.alive = True  # in the tree
        self.token_ids: tuple[int, ...] = ()  # kept only where events are on

    @property
    def evictable(self) -> bool:
        return self.alive and not (self.num_children or self.num_used)

    @property
    def has_blocks(self) -> bool:
        """Whether it has a block of any cache group."""
        return any(block_id != NO_BLOCK for block_id in self.block_ids)

    @property
    def groups(self) -> tuple[int, ...]:
        """The cache groups that this node has a block of."""
        return tuple(g for g, block_id in enumerate(self.block_ids) if block_id != NO_BLOCK)


class LeafQueue:
    """Evictable leaves, least recently used first: a heap whose stale entries are skipped, and swept when many.

    The first of all may stand beside the heap: a chain falls from its end, each parent next in turn after its child,
    and need not go through the heap.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._front: tuple[int, int, Node] | None = None  # comes before all in the heap
        self._num_offers = 0  # breaks ties, so that runs replay

    def offer(self, node: Node, num_nodes: int) -> None:
        """Queue ``node`` if it is evictable. ``num_nodes`` (in the tree) tells when a sweep pays."""
        if (
            not node.alive or node.num_children or node.num_used
        ):  # `evictable`, spelled out: this is called often
            return
        heap, front = self._heap, self._front
        if len(heap) > 2 * num_nodes + 64:
            heap[:] = [e for e in heap if e[0] == e[2].last_used and e[2].evictable]
            heapq.heapify(heap)
        self._num_offers += 1
        entry = (node.last_used, self._num_offers, node)
        if front is None and (not heap or entry < heap[0]):
            self._front = entry
        elif front is not None and entry < front:
            heapq.heappush(heap, front)
            self._front = entry
        else:
            heapq.heappush(heap, entry)

    def pop(self) -> Node | None:
        """Return the leaf that was not used for the longest time, or None."""
        while self._front is not None or self._heap:
            entry = self._front or heapq.heappop(self._heap)
            self._front = None
            used, _, node = entry
            if used == node.last_used and node.alive and not (node.num_children or node.num_used):
                return node
        return None
