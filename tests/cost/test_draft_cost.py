"""What proposing costs: its work by hand, and the fit to measured steps."""

from __future__ import annotations

import pytest

from quire.cost.cost_model import chunk_pairs
from quire.cost.draft_cost import DraftCost, DraftLedger, DraftWork, MeasuredDrafts, acceptance_of, fit_drafts
from quire.request import Sampling
from quire.step import NewSeq, SeqPlan, SeqResult, StepPlan, StepResult

TRUTH = DraftCost(0.3e-3, 0.05e-3, 0.007e-3, per_pair_s=2e-8, per_key_s=1e-7)


def test_a_draft_model_computes_what_it_missed() -> None:
    ledger = DraftLedger()
    new = NewSeq(7, 0, tuple(range(20)), (), Sampling(max_tokens=50), 0)
    prompt = StepPlan(0, (new,), (SeqPlan(7, 0, 0, 20, max_next_drafts=3),))
    found = StepResult(0, (SeqResult(7, 0, (1,), num_next_drafts=3),))
    # 21 known tokens, the last of which gives the first draft
    assert ledger.take(prompt, found) == DraftWork(3, 3, 20, chunk_pairs(0, 20), 21 + 22 + 23)
    verify = StepPlan(1, (), (SeqPlan(7, 0, 20, 4, num_draft_tokens=3, max_next_drafts=2),))
    right = StepResult(1, (SeqResult(7, 0, (1, 1, 1, 1), num_next_drafts=2),))
    # the last draft was never its input
    assert ledger.take(verify, right) == DraftWork(2, 2, 1, 24, 25 + 26)
    plain = StepPlan(2, (), (SeqPlan(7, 0, 24, 1),))
    for step in range(3):
        assert ledger.take(plain, StepResult(step, (SeqResult(7, 0, (1,)),))) == DraftWork()
    again = StepPlan(5, (), (SeqPlan(7, 0, 27, 1, max_next_drafts=1),))
    last = StepResult(5, (SeqResult(7, 0, (1,), num_next_drafts=1),))
    assert ledger.take(again, last) == DraftWork(1, 1, 3, 26 + 27 + 28, 29)


def test_long_prompts_are_caught_up_in_several_steps() -> None:
    """30 tokens at a time: each sequence gets its drafts a step after the one before it."""
    ledger = DraftLedger(30, cached_prefix=False)
    new = tuple(NewSeq(i, 0, tuple(range(20)), (), Sampling(max_tokens=50), 0) for i in range(3))

    def step(number: int, known: int, *counts: int) -> DraftWork:
        seqs = tuple(SeqPlan(i, 0, known - 1, 1, max_next_drafts=2) for i in range(3))
        found = tuple(SeqResult(i, 0, (1,), num_next_drafts=count) for i, count in enumerate(counts))
        return ledger.take(StepPlan(number, new if not number else (), seqs), StepResult(number, found))

    assert step(0, 20, 2, 0, 0) == DraftWork(2, 2, 20 + 9, chunk_pairs(0, 20) + chunk_pairs(0, 9), 21 + 22)
    assert ledger.behind == {1, 2}
    assert step(1, 21, 2, 2, 0).num_missed == 12 + 16
    assert ledger.behind == {2}
    assert step(2, 22, 2, 2, 2).num_missed == 6
    assert not ledger.behind


def test_the_fit_finds_what_proposing_takes() -> None:
    works = [
        DraftWork(k, k * seqs, missed, missed * keys // 2, k * seqs * keys)
        for k in (1, 2, 4)
        for seqs in (1, 4, 9)
        for missed in (0, 1, 60)
        for keys in (20, 400)
    ]
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
