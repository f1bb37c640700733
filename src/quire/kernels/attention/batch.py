"""What attention needs to know of a step: the ragged shape of the batch, and the constants of a layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Constants of one layer's attention. ``scale`` multiplies q·k, then ``soft_cap`` bends it: cap·tanh(s/cap)."""

    num_heads: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None


@dataclass(slots=True)
class RaggedBatch:
    """One cache group's view of a step. ``plans`` keeps what a kernel derived from it, for the next layer.

    ``cu_seqlens_q [num_seqs + 1]``, ``seq_lens [num_seqs]`` (KV length after this step), ``block_table
    [num_seqs, max_blocks]``: entries that a sequence does not have, or no longer needs, may be any valid block id.
    ``extents`` = (num_seqs, max_blocks), in memory because a native call reads them by address, as it does the rest:
    a recorded step is replayed with all four rewritten in place.
    """

    cu_seqlens_q: npt.NDArray[np.int64]
    seq_lens: npt.NDArray[np.int64]
    block_table: npt.NDArray[np.int64]
    extents: npt.NDArray[np.int64] = field(init=False)
    plans: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.extents = np.array((len(self.seq_lens), self.block_table.shape[1]), np.int64)

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)
