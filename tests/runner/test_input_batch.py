"""`StepPlan` → tensors, against a loop over tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tests.runner.tiny import GREEDY, SEED

from quire.errors import StepError
from quire.runner.input_batch import InputBatch, PreparedStep
from quire.runner.sequences import WorkerSeq, WorkerSeqs
from quire.sampling.draft_tree import chain
from quire.sampling.grammars import Grammars
from quire.sampling.sampler import SeqSample
from quire.step import NewSeq, SeqPlan

BLOCK = 16


def new_seq(seq_id: int, prompt: tuple[int, ...], output: tuple[int, ...] = (), epoch: int = 0) -> NewSeq:
    return NewSeq(seq_id, epoch, prompt, output, GREEDY, 0)


class Inputs:
    """Sequences and the steps made of them."""

    def __init__(self, max_num_seqs: int, max_model_len: int, num_groups: int) -> None:
        max_blocks = -(-max_model_len // BLOCK) + 1
        self.seqs = WorkerSeqs(
            1000, max_num_seqs, max_blocks * BLOCK, max_blocks=max_blocks, num_groups=num_groups,
            grammars=lambda: Grammars("", 1000, 1),
        )  # fmt: skip
        self.batch = InputBatch(self.seqs, BLOCK, max_num_seqs, 1)

    def of(self, plan: SeqPlan) -> WorkerSeq:
        seq = self.seqs.find(plan.seq_id)
        assert seq is not None
        return seq

    def update_tables(self, plans: tuple[SeqPlan, ...]) -> list[int]:
        return self.batch.update_tables(plans, [self.of(plan) for plan in plans])

    def prepare(self, *plans: SeqPlan) -> PreparedStep:
        for plan in plans:
            if plan.num_draft_tokens:
                self.seqs.drafting(self.of(plan)).take(plan)
        return self.batch.prepare(plans, [self.of(plan) for plan in plans])

    def append(self, seq_id: int, token_id: int) -> None:
        seq = self.seqs.find(seq_id)
        assert seq is not None
        self.seqs.expect(np.array([seq.row]))
        self.seqs.settle([seq], [SeqSample((token_id,))])


def test_against_a_loop() -> None:
    rng = random.Random(SEED)
    inputs = Inputs(64, 200, 2)
    ids: dict[int, list[int]] = {}
    tables: dict[int, list[list[int]]] = {}
    plans = []
    for seq_id in range(100):  # more than the rows it starts with
        ids[seq_id] = [rng.randrange(1000) for _ in range(rng.randint(1, 200))]
        cut = rng.randint(1, len(ids[seq_id]))
        inputs.seqs.admit(new_seq(seq_id, tuple(ids[seq_id][:cut]), tuple(ids[seq_id][cut:])))
        computed = rng.randrange(len(ids[seq_id]))
        rows = rng.choice((len(ids[seq_id]) - computed, rng.randint(1, len(ids[seq_id]) - computed)))
        tables[seq_id] = [[rng.randrange(5000) for _ in range(13)] for _ in range(2)]
        plans.append(
            SeqPlan(
                seq_id, 0, computed, rows, (0, 3), (tuple(tables[seq_id][0]), tuple(tables[seq_id][1][3:]))
            )
        )
        tables[seq_id][1][:3] = [0, 0, 0]
    rng.shuffle(plans)
    inputs.update_tables(tuple(plans))
    prepared = inputs.prepare(*plans)
    batch = prepared.batch
    want_ids, want_positions, want_logits, sampling = [], [], [], []
    slots: list[list[tuple[int, int]]] = [[], []]
    for index, plan in enumerate(plans):
        for position in range(plan.num_computed_tokens, plan.num_computed_tokens + plan.num_scheduled_tokens):
            want_ids.append(ids[plan.seq_id][position])
            want_positions.append(position)
            for group in range(2):
                slots[group].append((tables[plan.seq_id][group][position // BLOCK], position % BLOCK))
        if plan.num_computed_tokens + plan.num_scheduled_tokens == len(ids[plan.seq_id]):
            want_logits.append(len(want_ids) - 1)
            sampling.append(index)
    assert batch.input_ids.tolist() == want_ids
    assert batch.positions.tolist() == want_positions
    assert batch.logits_indices.tolist() == want_logits
    assert [seq.seq_id for seq in prepared.sampling] == [plans[index].seq_id for index in sampling]
    assert prepared.columns["position"].tolist() == [want_positions[row] + 1 for row in want_logits]
    for group in range(2):
        got = batch.groups[group]
        assert list(zip(got.slot_blocks.tolist(), got.slot_offsets.tolist(), strict=True)) == slots[group]
        assert got.ragged.seq_lens.tolist() == [p.num_computed_tokens + p.num_scheduled_tokens for p in plans]
        for row, plan in enumerate(plans):
            blocks = -(-int(got.ragged.seq_lens[row]) // BLOCK)
            assert got.ragged.block_table[row, :blocks].tolist() == tables[plan.seq_id][group][:blocks]
    assert all(tensor.dtype == torch.int64 for tensor in (batch.input_ids, batch.positions))


def test_fresh_blocks_are_those_that_hold_nothing() -> None:
    inputs = Inputs(2, 200, 1)
    inputs.seqs.admit(new_seq(1, tuple(range(100))))
    # 20 tokens are computed (a prefix hit and a copied tail): blocks 7 and 8 hold them.
    plan = SeqPlan(1, 0, 20, 40, (0,), ((7, 8, 9, 4),))
    assert inputs.update_tables((plan,)) == [9, 4]
    assert inputs.update_tables((SeqPlan(1, 0, 60, 4),)) == []
    assert inputs.update_tables((SeqPlan(1, 0, 64, 4, (4,), ((2,),)),)) == [2]
    # A sliding group whose early rows hold no block any more.
    assert inputs.update_tables((SeqPlan(1, 0, 32, 4, (0,), ((-1, 5, 6),)),)) == [6]
    assert inputs.prepare(SeqPlan(1, 0, 32, 4)).batch.groups[0].ragged.block_table.min() >= 0


def test_appended_and_forced_ids() -> None:
    inputs = Inputs(2, 64, 1)
    inputs.seqs.admit(new_seq(1, (5, 6, 7)))
    inputs.append(1, 8)
    assert inputs.prepare(SeqPlan(1, 0, 2, 2)).batch.input_ids.tolist() == [7, 8]
    forced = SeqPlan(1, 0, 2, 2, forced_token_ids=(9,))
    inputs.batch.force(forced, inputs.of(forced))
    assert inputs.prepare(forced).batch.input_ids.tolist() == [7, 9]
    assert inputs.prepare(SeqPlan(1, 0, 3, 1)).batch.input_ids.tolist() == [9]


def test_rows_are_reused_and_epochs_replace() -> None:
    inputs = Inputs(2, 64, 1)
    inputs.seqs.admit(new_seq(1, (5, 6, 7), (8,)))
    inputs.seqs.admit(new_seq(1, (5, 6), epoch=1))
    assert inputs.prepare(SeqPlan(1, 1, 0, 2)).num_logits == 1
    inputs.seqs.drop(1)
    inputs.seqs.drop(1)
    assert len(inputs.seqs) == 0
    inputs.seqs.admit(new_seq(2, (1,)))
    assert inputs.prepare(SeqPlan(2, 0, 0, 1)).batch.input_ids.tolist() == [1]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (SeqPlan(1, 0, 0, 4), "3 tokens are known"),
        (SeqPlan(1, 0, 2, 0), "planned"),
        (SeqPlan(1, 0, 2, 4, num_draft_tokens=3), "2 drafts after 3 tokens"),
        (SeqPlan(1, 0, 0, 3, num_draft_tokens=2), "up to token 3"),
    ],
)
def test_a_plan_that_does_not_fit_the_state_is_refused(plan: SeqPlan, said: str) -> None:
    inputs = Inputs(2, 64, 1)
    inputs.seqs.drafting(inputs.seqs.admit(new_seq(1, (5, 6, 7)))).drafts = chain((8, 9))
    with pytest.raises(StepError, match=said):
        inputs.prepare(plan)


def test_room_for_one_token_beyond_the_context() -> None:
    """The last sampled id may have no row left to be computed in; the scheduler ends the sequence."""
    inputs = Inputs(1, BLOCK, 1)
    inputs.seqs.admit(new_seq(1, tuple(range(BLOCK))))
    for token in range(40):
        inputs.append(1, token)
    assert inputs.prepare(SeqPlan(1, 0, 0, 1)).batch.input_ids.tolist() == [0]


def test_drafts_get_a_row_of_logits_each() -> None:
    inputs = Inputs(3, 64, 1)
    for seq_id, prompt, drafts in ((1, (5, 6, 7), (8, 9)), (2, (3,), ()), (3, (1, 2), (4, 5, 6))):
        inputs.seqs.drafting(inputs.seqs.admit(new_seq(seq_id, prompt))).drafts = chain(drafts)
    plans = (
        SeqPlan(1, 0, 2, 3, num_draft_tokens=2),
        SeqPlan(2, 0, 0, 1),
        SeqPlan(3, 0, 0, 3, num_draft_tokens=1),
    )
    step = inputs.prepare(*plans)
    assert step.batch.input_ids.tolist() == [7, 8, 9, 3, 1, 2, 4]
    assert step.batch.logits_indices.tolist() == [0, 1, 2, 3, 5, 6]
    assert step.columns["position"].tolist() == [3, 4, 5, 1, 2, 3]
    assert [inputs.seqs.drafting(seq).verifying.token_ids for seq in step.sampling] == [(8, 9), (), (4,)]
    first = inputs.of(plans[0])
    inputs.seqs.drafting(first).accept([0])  # 9 is rejected
    inputs.append(1, 99)
    assert inputs.seqs.num_tokens[first.row] == 5
