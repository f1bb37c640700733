"""`StatePool`: a worker's memory of recurrent states. `StateRows`: the arrays by which a step's layers find theirs.

Memory that no sequence was large enough for is mapped and not touched, as that of the KV cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.state_pool import StateBatch, slot_elements, view_states
from quire.modelspec import ModelSpec
from quire.runner.memory import reserve
from quire.step import SeqPlan


class StatePool:
    """``num_slots`` slots of the layers of ``spec``: ``storage [num_slots, slot_elements]`` fp32."""

    def __init__(self, spec: ModelSpec, num_slots: int) -> None:
        self.storage = reserve(num_slots, slot_elements(spec), torch.float32)
        self.views = view_states(self.storage, spec)

    def copy(self, moves: Iterable[tuple[int, int]]) -> None:
        """Copy whole slots (source, target) in list order."""
        for source, target in moves:
            self.storage[target].copy_(self.storage[source])

    def rows(self, cu_seqlens: npt.NDArray[np.int64], max_seqs: int, max_tokens: int) -> StateRows:
        """Return arrays for steps of so many sequences and tokens; ``cu_seqlens``: as of `StateRows`."""
        # A chunk has a checkpoint at most per block, and each sequence one.
        return StateRows(self, cu_seqlens, max_seqs, max_tokens + max_seqs)


class StateRows:
    """The slots of a step of up to ``max_seqs`` sequences, at addresses that do not change."""

    def __init__(
        self, pool: StatePool, cu_seqlens: npt.NDArray[np.int64], max_seqs: int, max_saves: int
    ) -> None:
        """``cu_seqlens``: [max_seqs + 1], of the step; shared with its other arrays."""
        self._pool, self._cu_seqlens = pool, cu_seqlens
        self._slots, self._fresh = np.zeros(max_seqs, np.int64), np.zeros(max_seqs, np.int64)
        self._saves = np.zeros((max_saves, 3), np.int64)
        self._num_saves = 0
        self.whole = StateBatch(cu_seqlens, self._slots, self._fresh, self._saves, pool.views)

    def fill(self, plans: Sequence[SeqPlan], slots: npt.NDArray[np.int64]) -> None:
        """Write the sequences of ``plans``, which have ``slots``."""
        count = len(plans)
        assert count == len(slots)
        assert slots.min(initial=0) >= 0, "a sequence without a slot for its state"
        self._slots[:count] = slots
        self._fresh[:count] = [plan.num_computed_tokens == 0 for plan in plans]
        saves = [(index, *save) for index, plan in enumerate(plans) for save in plan.checkpoints]
        self._num_saves = len(saves)
        if saves:
            self._saves[: len(saves)] = saves
        self.whole.extents[:] = count, len(saves)

    def batch(self, num_seqs: int) -> StateBatch:
        """Return views of the part of a step of ``num_seqs`` sequences."""
        saves = self._saves[: self._num_saves]
        parts = self._cu_seqlens[: num_seqs + 1], self._slots[:num_seqs], self._fresh[:num_seqs]
        return StateBatch(*parts, saves, self._pool.views)
