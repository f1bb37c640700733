"""`Proposer`: drafts the tokens that follow a sequence. `quire.runner.verify` decides which of them are accepted.

A proposer can be wrong at no risk: verification samples every token from the target. It belongs to a worker and works
on all sequences of a step at once, so that a draft model computes them as one batch. What it remembers of a sequence
is kept by the worker beside the sequence and goes with it: a preempted sequence comes back without it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from quire.sampling.draft_tree import Drafts


class Wanted(NamedTuple):
    """A sequence that may verify up to ``limit`` ≥ 1 drafts in its next step."""

    seq_id: int
    token_ids: npt.NDArray[np.int32]  # known, prompt and output: a view
    limit: int
    state: Any  # from `Proposer.begin`
    max_paths: int = 1  # paths per tree of drafts; 1: a chain
    # What the target sampled in the last step behind the last known token, and behind each draft that it verified, in
    # the order of the drafts; empty: it verified none.
    sampled: tuple[int, ...] = ()


class Proposer(Protocol):
    """Proposes a chain or a tree of drafts per sequence."""

    def begin(self) -> Any:
        """Return the state of a sequence of which nothing was seen."""
        ...

    def propose(self, wanted: list[Wanted]) -> list[Drafts]:
        """Return for each sequence 0 … ``limit`` drafts of the tokens behind the known ones.

        A step verifies the first of them where it has no room for all, so the most likely ones come first.
        """
        ...
