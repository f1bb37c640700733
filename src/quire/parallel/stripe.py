"""`Stripe`: the positions of a sequence whose keys and values lie on one rank of the cp axis. Pure maths.

A block of the scheduler has ``count · size`` positions: ``size`` neighbouring ones on each of ``count`` ranks, under
one block id. So every rank has the same share of every sequence, whatever blocks it gets, and a block table is the same
on all ranks. With two ranks and blocks of 4 positions on each::

    position   0 1 2 3  4 5 6 7 | 8 9 …          rank = position // size mod count
    rank       0 0 0 0  1 1 1 1 | 0 0 …          row of the block table = position // (count · size)
    own number 0 1 2 3  0 1 2 3 | 4 5 …          offset in the rank's block = position mod size

A rank numbers its positions without gaps (its own number): the first n of a sequence's blocks have its first n · size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

DIVIDE_FROM = 32  # rows per rank from which a step's rows are divided
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stripe:
    """The stripe ``index`` of ``count``; ``size``: positions of a block on a rank."""

    index: int
    count: int
    size: int

    def below(self, positions: Any) -> Ints:
        """Return how many of the positions below each of ``positions`` this rank has."""
        rows, rest = np.divmod(positions, self.count * self.size)
        own: Ints = rows * self.size + np.clip(rest - self.index * self.size, 0, self.size)
        return own

    def has(self, positions: Ints) -> npt.NDArray[np.bool_]:
        """Return which of ``positions`` this rank has."""
        return np.equal(positions // self.size % self.count, self.index)
