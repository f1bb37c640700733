"""`HiddenWatcher`: what sees hidden states of every token of a step, for heads that draft from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from quire.layers.attention import StepBatch


class HiddenWatcher(Protocol):
    """Sees hidden states of every token of a step, for heads that draft from them."""

    # Layers whose inputs it sees, ascending, counted from this stage's first: a stage before sends those below 0.
    # Empty: it sees the hidden states after the last norm.
    taps: tuple[int, ...]

    def store(self, batch: StepBatch, hidden: Sequence[Tensor]) -> None:
        """Take what the ``taps`` say, each ``[num_tokens, hidden_size]``. May be recorded (`kernels.tape`)."""
        ...
