"""`Proposer`: guesses the tokens that follow a sequence. `quire.runner.verify` decides which of them hold.

A proposer can be wrong at no risk: verification samples every token from the target. It belongs to a worker and works
on all sequences of a step at once, so that a draft model computes them as one batch. What it remembers of a sequence
is kept by the worker beside the sequence and goes with it: a preempted sequence comes back without it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


class Wanted(NamedTuple):
    """A sequence that may verify up to ``limit`` ≥ 1 drafts in its next step."""

    seq_id: int
    token_ids: npt.NDArray[np.int32]  # known, prompt and output: a view
    limit: int
    state: Any  # of `Proposer.begin`


class Proposer(Protocol):
    """Proposes a chain of drafts per sequence."""

    def begin(self) -> Any:
        """Return the state of a sequence of which nothing was seen."""
        ...

    def propose(self, wanted: list[Wanted]) -> list[tuple[int, ...]]:
        """Return for each sequence the drafts of the tokens behind the known ones: 0 … ``limit`` ids."""
        ...
