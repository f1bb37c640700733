"""Bytes that one device sends in a collective, by its algorithm (rings: Patarasuk and Yuan 2009)."""

from __future__ import annotations

from typing import Literal

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


def collective_bytes(kind: Collective, num_ranks: int, size: float) -> float:
    """Return the bytes that each of ``num_ranks`` sends, where the whole result (all_to_all: the input) has ``size``.

    An all-reduce is a reduce-scatter and an all-gather. A send moves everything, to one neighbour.
    """
    if num_ranks == 1:
        return 0.0
    if kind == "send":
        return size
    others = (num_ranks - 1) / num_ranks * size
    return 2 * others if kind == "all_reduce" else others
