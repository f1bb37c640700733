"""`make_proposer`: the proposer that a configuration asks for."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.speculate.ngram import NgramProposer
from quire.speculate.proposer import Proposer


def make_proposer(config: EngineConfig) -> Proposer | None:
    """Return the proposer of ``config.speculate``; None: without speculation."""
    if config.speculate is None:
        return None
    return NgramProposer()
