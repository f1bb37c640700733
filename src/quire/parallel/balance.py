"""Which rank has which experts of a layer, given how many tokens each expert had. Pure maths; torch-free.

The algorithm is that of EPLB (DeepSeek-V3, arXiv:2412.19437, section 3.4.2; github.com/deepseek-ai/EPLB): the slots
beyond one per expert go, one after another, to the expert with the most tokens per copy; the copies are then packed,
the heaviest first, onto the lightest rank that has room. With several nodes, groups of experts (of which the router
takes few per token) are packed onto nodes first, so that a token stays on few nodes.

A placement is the expert in each slot; slots are numbered rank by rank, as many on each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

Placement = tuple[int, ...]
Loads = Sequence[float]  # tokens of each expert


class Move(NamedTuple):
    """The expert in the slot ``source`` is to be in the slot ``target`` too, or instead of the one there."""

    source: int
    target: int


def pack(weights: Loads, num_packs: int) -> list[list[int]]:
    """Distribute items over packs of equal size: the heaviest first, into the lightest pack that has room."""
    size, rest = divmod(len(weights), num_packs)
    assert rest == 0, (len(weights), num_packs)
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    totals = [0.0] * num_packs
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        lightest = min((p for p in range(num_packs) if len(packs[p]) < size), key=lambda p: (totals[p], p))
        packs[lightest].append(item)
        totals[lightest] += weights[item]
    return packs


def copies(loads: Loads, num_slots: int) -> list[int]:
    """Return how many of ``num_slots`` slots each expert gets: one, and more where it has the most per copy."""
    assert num_slots >= len(loads), (num_slots, len(loads))
    counts = [1] * len(loads)
    for _ in range(num_slots - len(loads)):
        counts[max(range(len(loads)), key=lambda e: (loads[e] / counts[e], -e))] += 1
    return counts


def balance(
    loads: Loads, num_slots: int, num_ranks: int, *, num_groups: int = 1, num_nodes: int = 1
) -> Placement:
    """Return a placement with even loads on the ranks.

    ``num_groups``: of consecutive experts, which stay on one node where they can be shared out evenly over the nodes.
    """
    if num_nodes == 1 or num_groups % num_nodes or num_ranks % num_nodes:
        num_nodes = num_groups = 1
    size = len(loads) // num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(num_groups)]
    nodes = pack([sum(loads[e] for e in group) for group in groups], num_nodes)
    placed: list[int] = []
    for node in nodes:
        experts = [expert for group in sorted(node) for expert in groups[group]]
        counts = copies([loads[e] for e in experts], num_slots // num_nodes)
        shares = [(e, loads[e] / n) for e, n in zip(experts, counts, strict=True) for _ in range(n)]
        for items in pack([load for _, load in shares], num_ranks // num_nodes):
            placed += [shares[item][0] for item in items]
    return tuple(placed)


def keep(old: Placement, new: Placement, num_ranks: int, num_nodes: int = 1) -> Placement:
    """Return ``new`` with ranks of a node exchanged, and slots of a rank, so that few experts move from ``old``."""
    size = len(old) // num_ranks
    ranks = [range(r * size, (r + 1) * size) for r in range(num_ranks)]
    before = [[old[slot] for slot in slots] for slots in ranks]
    packs = [[new[slot] for slot in slots] for slots in ranks]
    placed: list[int] = []
    for rank in range(num_ranks):
        first = rank // (num_ranks // num_nodes) * (num_ranks // num_nodes)
        left = [p for p in range(first, first + num_ranks // num_nodes) if packs[p]]
        best = max(left, key=lambda p: (sum((Counter(packs[p]) & Counter(before[rank])).values()), -p))
        coming, packs[best] = Counter(packs[best]), []
        stays = []
        for expert in before[rank]:
            stays.append(coming[expert] > 0)
            coming[expert] -= stays[-1]
        others = iter(sorted(coming.elements()))
        placed += [e if stay else next(others) for e, stay in zip(before[rank], stays, strict=True)]
    return tuple(placed)


def moves(old: Placement, new: Placement, num_ranks: int) -> list[Move]:
    """Return the copies that make ``new`` of ``old``, all of them read before any slot is written.

    A copy on the same rank is taken where there is one.
    """
    size = len(old) // num_ranks
    made = []
    for target, expert in enumerate(new):
        if old[target] != expert:
            holders = [slot for slot, held_expert in enumerate(old) if held_expert == expert]
            made.append(Move(min(holders, key=lambda s: (s // size != target // size, s)), target))
    return made


def rank_loads(placement: Placement, loads: Loads, num_ranks: int) -> list[float]:
    """Return the tokens of each rank: copies of an expert take its tokens in turn."""
    counts, size = Counter(placement), len(placement) // num_ranks
    return [
        sum(loads[e] / counts[e] for e in placement[rank * size : (rank + 1) * size])
        for rank in range(num_ranks)
    ]


def imbalance(loads: Loads) -> float:
    """Return max / mean; 1 where nothing was computed."""
    return max(loads) * len(loads) / total if (total := sum(loads)) else 1.0
