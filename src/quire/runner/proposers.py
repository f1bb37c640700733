"""`make_proposer`: the proposer that a configuration asks for, and the draft model that it may need."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.runner.draft_model import DraftModel
from quire.runner.sequences import WorkerSeqs
from quire.speculate.draft import DraftProposer
from quire.speculate.ngram import NgramProposer
from quire.speculate.proposer import Proposer


def make_draft_model(config: EngineConfig, seqs: WorkerSeqs) -> DraftModel | None:
    """Load the draft model of ``config.speculate``; None: there is none."""
    draft = None if config.speculate is None else config.speculate.draft
    return None if draft is None else DraftModel(config, draft, seqs)


def make_proposer(config: EngineConfig, draft_model: DraftModel | None) -> Proposer | None:
    """Return the proposer of ``config.speculate``; None: without speculation."""
    if config.speculate is None:
        return None
    return NgramProposer() if draft_model is None else DraftProposer(draft_model)
