"""`RankPage`: a page of shared memory in which each rank counts what it has done; the engine reads it. Torch-free.

The page has no name and no file, so nothing is left behind whatever dies.
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

_SLOTS = len(("busy_s", "num_steps", "bytes_sent"))
_WORD = 8


class RankCounts(NamedTuple):
    """What a rank has done since its start."""

    busy_s: float = 0.0  # in which it computed, without waiting for another stage
    num_steps: float = 0.0
    bytes_sent: float = 0.0  # to the next stage


class RankPage:
    """The counts of ``num_ranks`` ranks. ``fd``: of a page that exists; None makes one."""

    def __init__(self, num_ranks: int, fd: int | None = None) -> None:
        size = num_ranks * _SLOTS * _WORD
        self.fd = os.memfd_create("quire-ranks", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, size)
        self._slots = memoryview(mmap.mmap(self.fd, size)).cast("d")
        self._num_ranks = num_ranks

    def note(self, rank: int, counts: RankCounts) -> None:
        """Write the counts of ``rank``: aligned words, each whole."""
        for slot, value in enumerate(counts):
            self._slots[rank * _SLOTS + slot] = value

    def read(self) -> list[RankCounts]:
        """Return the counts of every rank."""
        values = self._slots.tolist()
        return [RankCounts(*values[i : i + _SLOTS]) for i in range(0, len(values), _SLOTS)]

    def close(self) -> None:
        """Close the descriptor; the page can still be read."""
        os.close(self.fd)
