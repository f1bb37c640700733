"""What proposing costs: its work by hand, and the fit to measured steps."""

from __future__ import annotations

import pytest

from quire.plan.draft_cost import DraftCost, DraftLedger, DraftWork, MeasuredDrafts, acceptance_of, fit_drafts
from quire.request import Sampling
from quire.step import NewSeq, SeqPlan, SeqResult, StepPlan, StepResult

TRUTH = DraftCost(0.3e-3, 0.05e-3, 0.007e-3)


def test_a_draft_model_computes_what_it_missed() -> None:
    ledger = DraftLedger()
    new = NewSeq(7, 0, tuple(range(20)), (), Sampling(max_tokens=50), 0)
    prompt = StepPlan(0, (new,), (SeqPlan(7, 0, 0, 20, max_next_drafts=3),))
    found = StepResult(0, (SeqResult(7, 0, (1,), num_next_drafts=3),))
    assert ledger.take(prompt, found) == DraftWork(
        3, 3, 20
    )  # 21 known tokens, the last of which gives the first draft
    verify = StepPlan(1, (), (SeqPlan(7, 0, 20, 4, num_draft_tokens=3, max_next_drafts=2),))
    right = StepResult(1, (SeqResult(7, 0, (1, 1, 1, 1), num_next_drafts=2),))
    assert ledger.take(verify, right) == DraftWork(2, 2, 1)  # the last draft was never its input
    plain = StepPlan(2, (), (SeqPlan(7, 0, 24, 1),))
    for step in range(3):
        assert ledger.take(plain, StepResult(step, (SeqResult(7, 0, (1,)),))) == DraftWork()
    again = StepPlan(5, (), (SeqPlan(7, 0, 27, 1, max_next_drafts=1),))
    assert ledger.take(again, StepResult(5, (SeqResult(7, 0, (1,), num_next_drafts=1),))) == DraftWork(
        1, 1, 3
    )


def test_the_fit_finds_what_proposing_takes() -> None:
    works = [DraftWork(k, k * seqs, missed) for k in (1, 2, 4) for seqs in (1, 4, 9) for missed in (0, 1, 60)]
    found = fit_drafts(
        [MeasuredDrafts(work, TRUTH.seconds(work), ((2, 1), (2, 2), (2, 0))) for work in works]
    )
    assert found is not None
    for work in works:
        assert found.seconds(work) == pytest.approx(TRUTH.seconds(work), rel=0.01)
    assert found.acceptance == (pytest.approx(2 / 3), 0.5)
    assert DraftCost.from_json(found.to_json()) == found
    assert fit_drafts([]) is None


def test_acceptance_counts_the_drafts_that_were_reached() -> None:
    assert acceptance_of([(3, 0), (3, 1), (3, 3), (1, 1)]) == (0.75, 0.5, 1.0)
