"""`MedusaProposer`: heads on the model's last hidden state guess the tokens that follow (Cai et al. 2024).

Head k, from 0, guesses the token k + 1 behind the one that the hidden state itself gives. The heads do not see each
other's tokens, so the drafts of a step cost one small forward pass, however many they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.sampling.draft_tree import Drafts, chain
from quire.speculate.proposer import Wanted


class MedusaForward(Protocol):
    """The heads, and the hidden state that sampled the last token of each sequence."""

    num_heads: int

    def sample(self, seq_ids: Sequence[int], num_drafts: int) -> list[list[int]]:
        """Return what the first ``num_drafts`` ≤ `num_heads` heads sample behind each sequence's known tokens."""
        ...


class MedusaProposer:
    """One draft per head."""

    def __init__(self, model: MedusaForward) -> None:
        self._model = model

    def begin(self) -> tuple[()]:
        """As `Proposer.begin`: the heads need nothing but the last hidden state."""
        return ()

    def propose(self, wanted: list[Wanted]) -> list[Drafts]:
        """As `Proposer.propose`."""
        limits = [min(each.limit, self._model.num_heads) for each in wanted]
        found = self._model.sample([each.seq_id for each in wanted], max(limits))
        return [chain(drafts[:limit]) for drafts, limit in zip(found, limits, strict=True)]
