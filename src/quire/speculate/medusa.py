"""`MedusaProposer`: heads on the model's last hidden state guess the tokens that follow (Cai et al. 2024).

Head k, from 0, guesses the token k + 1 behind the one that the hidden state itself gives. The heads do not see each
other's tokens, so the drafts of a step cost one small forward pass, however many they are. In a tree a head's second
and further choices stand beside its first one, and the next head's choices stand behind each of them:

    head     0        1        2
    last ─┬─ first ─┬─ first ── first
          │         └─ second
          └─ second ── first
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from quire.sampling.draft_tree import ROOT, Drafts
from quire.speculate.proposer import Wanted


class Node(NamedTuple):
    """A draft before it has a token: the choice ``rank``, from 0, of a head, behind the node ``parent``."""

    head: int
    rank: int
    parent: int


class MedusaForward(Protocol):
    """The heads, and the hidden state that sampled the last token of each sequence."""

    num_heads: int

    def sample(self, seq_ids: Sequence[int], trees: Sequence[Sequence[Node]]) -> list[Drafts]:
        """Return what the heads choose behind each sequence's known tokens, for the nodes of its tree (`planted`)."""
        ...


class MedusaProposer:
    """A draft per head, or a tree of choices."""

    def __init__(self, model: MedusaForward) -> None:
        self._model = model

    def begin(self) -> tuple[()]:
        """As `Proposer.begin`: the heads need nothing but the last hidden state."""
        return ()

    def propose(self, wanted: list[Wanted]) -> list[Drafts]:
        """As `Proposer.propose`."""
        trees = [shape_of(self._model.num_heads, seq.limit, seq.max_paths) for seq in wanted]
        return self._model.sample([seq.seq_id for seq in wanted], trees)


@lru_cache(maxsize=256)
def shape_of(num_heads: int, limit: int, max_paths: int) -> tuple[Node, ...]:
    """Return the nodes of a tree of up to ``limit`` drafts and ``max_paths`` paths, the likeliest first.

    A choice counts half as likely as the one before it, and so does a token behind another.
    """
    nodes: list[Node] = []
    children: dict[int, int] = {}
    num_paths = 0
    waiting = [(1, 0, Node(0, 0, ROOT))]  # (halvings, order of entry)
    entered = 1
    while waiting and len(nodes) < limit:
        halvings, _, node = heapq.heappop(waiting)
        # The first behind a node goes on with its path.
        begins = node.parent == ROOT or children.get(node.parent, 0) > 0
        if begins and num_paths == max_paths:
            continue
        num_paths += begins
        children[node.parent] = children.get(node.parent, 0) + 1
        place = len(nodes)
        nodes.append(node)
        following = [Node(node.head, node.rank + 1, node.parent)]
        if node.head + 1 < num_heads:
            following.insert(0, Node(node.head + 1, 0, place))
        for child in following:
            heapq.heappush(waiting, (halvings + 1, entered, child))
            entered += 1
    return tuple(nodes)


def planted(nodes: Sequence[Node], choices: Sequence[Sequence[int]]) -> tuple[Drafts, list[Node]]:
    """Return the drafts of ``nodes`` with the tokens ``choices[head][rank]``, and the nodes that have one.

    Where a head has fewer choices than the tree has room for, nodes are left out with all behind them.
    """
    places: dict[int, int] = {ROOT: ROOT}
    token_ids: list[int] = []
    parents: list[int] = []
    having: list[Node] = []
    for place, node in enumerate(nodes):
        if node.parent in places and node.rank < len(choices[node.head]):
            places[place] = len(token_ids)
            token_ids.append(choices[node.head][node.rank])
            parents.append(places[node.parent])
            having.append(node)
    return Drafts(tuple(token_ids), tuple(parents)), having
