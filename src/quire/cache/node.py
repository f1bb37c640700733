"""`Node` of the prefix tree, and the queue of idle nodes."""

from __future__ import annotations

from collections import deque

NO_BLOCK = -1


class Node:
    """One block of tokens after one prefix."""

    __slots__ = (
        "alive",
        "block_hash",
        "block_ids",
        "num_children",
        "num_places",
        "num_used",
        "parent",
        "parent_hash",
        "step",
        "token_ids",
    )

    def __init__(
        self,
        block_hash: bytes,
        parent: Node | None,
        parent_hash: bytes,
        block_ids: tuple[int, ...],
        step: int,
    ) -> None:
        self.block_hash = block_hash
        self.parent = parent
        self.parent_hash = parent_hash  # the root's hash where there is no parent
        self.num_children = 0  # nodes whose parent it is
        self.block_ids = block_ids  # per cache group, or NO_BLOCK
        self.num_used = 0  # how many of block_ids have a reference beside the tree's
        self.num_places = 0  # in the `IdleQueue`
        self.step = step  # the step that computes the block: in flight for a prompt block just published
        self.alive = True  # in the tree
        self.token_ids: tuple[int, ...] = ()  # kept only where events are on

    @property
    def has_blocks(self) -> bool:
        """Whether it has a block of any cache group."""
        return any(block_id != NO_BLOCK for block_id in self.block_ids)

    @property
    def groups(self) -> tuple[int, ...]:
        """The cache groups that this node has a block of."""
        return tuple(g for g, block_id in enumerate(self.block_ids) if block_id != NO_BLOCK)


class IdleQueue:
    """Nodes in the order in which they became idle (`num_used` 0): the least recently used first.

    A node that is used again keeps its place, which means nothing: of several places of a node the last one counts.
    A sequence that uses a node uses its ancestors, and gives them up after it, so with a cache group that keeps every
    row a node comes before its parent, and the first that is idle is a leaf. Where all groups slide it may have
    children: then it loses its place, until the last of them goes.
    """

    def __init__(self) -> None:
        self._nodes: deque[Node] = deque()

    def add(self, node: Node, num_nodes: int) -> None:
        """``node`` became idle. ``num_nodes`` (in the tree) tells when it pays to sweep."""
        node.num_places += 1
        self._nodes.append(node)
        if len(self._nodes) > 2 * num_nodes + 64:
            self._nodes = deque([each for each in self._nodes if self._counts(each)])
            for each in self._nodes:
                each.num_places = 1

    def lost_children(self, node: Node) -> None:
        """The last child of an idle node went; if it lost its place before, no other was idle for longer."""
        if node.num_places == 0:
            node.num_places = 1
            self._nodes.appendleft(node)

    def pop(self) -> Node | None:
        """Take out and return the leaf that was idle for the longest time, or None."""
        while self._nodes:
            node = self._nodes.popleft()
            if self._counts(node) and not node.num_children:
                return node
        return None

    def _counts(self, node: Node) -> bool:
        """Take a place of ``node`` away; tell whether it counted."""
        node.num_places -= 1
        return node.num_places == 0 and node.alive and not node.num_used
