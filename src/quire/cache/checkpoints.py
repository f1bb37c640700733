"""`Checkpoints`: the states that nodes of the prefix tree have, and which of them goes first.

A checkpoint is worth the tokens that a prompt computes without it: those behind the checkpoint before it on its path.
Each knows that one, so the worth of those that are left grows as others go.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from quire.cache.blocks import Node
from quire.cache.checkpoint_places import Kind, Place, score


@dataclass(slots=True, eq=False)
class LiveState:
    """The state of one running sequence."""

    slot: int
    num_known: int  # tokens at its admission; those behind them are its answer
    places: list[Place] = field(default_factory=list)  # for checkpoints, not computed yet
    tail: Node | None = None  # where its last checkpoint of kind ANSWER is
    # The checkpoint from which it began, until it has one of its own.
    source: Checkpoint | None = None
    is_running: bool = True


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A state that a node of the prefix tree has."""

    slot: int
    num_tokens: int
    kind: Kind
    used_at: int  # `StateSlots.num_admitted` at its last use
    owner: LiveState
    num_hits: int = 0
    # The one before it on its path, if there is one.
    previous: Checkpoint | None = None

    @property
    def num_saved(self) -> int:
        """Tokens that a prompt computes again without it."""
        return self.num_tokens - (0 if self.previous is None else self.previous.num_tokens)


class Checkpoints(dict[Node, Checkpoint]):
    """Checkpoints by node; some are of nodes that left the tree since."""

    def add(self, node: Node, checkpoint: Checkpoint) -> None:
        """``node``, which has none, gets ``checkpoint``."""
        assert node not in self
        checkpoint.previous = self._before(node)
        self[node] = checkpoint
        for other, later in self.items():
            is_later = later.num_tokens > checkpoint.num_tokens
            if is_later and later.previous is checkpoint.previous and self._before(other) is checkpoint:
                later.previous = checkpoint

    def _before(self, node: Node) -> Checkpoint | None:
        """Return the last checkpoint on the path to ``node``, without its own."""
        parent = node.parent
        while parent is not None and parent not in self:
            parent = parent.parent
        return None if parent is None else self[parent]

    def remove(self, node: Node) -> int:
        """Forget the checkpoint of ``node``; return its slot."""
        gone = self.pop(node)
        for checkpoint in self.values():
            if checkpoint.previous is gone:
                checkpoint.previous = gone.previous
        return gone.slot

    def least_likely(self, num_admitted: int, held: Collection[int] = ()) -> tuple[Node, float] | None:
        """Return the node whose checkpoint goes first, and its score, once ``num_admitted`` sequences were admitted.

        ``held``: slots whose checkpoints may not go now.
        """
        scores = [
            (self._score(node, checkpoint, num_admitted), node)
            for node, checkpoint in self.items()
            if checkpoint.slot not in held
        ]
        if not scores:
            return None
        least, node = min(scores, key=lambda pair: pair[0])
        return node, least

    def _score(self, node: Node, checkpoint: Checkpoint, num_admitted: int) -> float:
        if checkpoint.owner.is_running and checkpoint.owner.tail is node:
            return math.inf
        age = num_admitted - checkpoint.used_at
        return score(checkpoint.kind, checkpoint.num_hits, age, checkpoint.num_saved)
