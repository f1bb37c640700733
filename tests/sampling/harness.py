"""A worker's sequences and its sampler without a model: logits come from the test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.kernels.registry import KernelChoice
from quire.runner.sequences import WorkerSeq, WorkerSeqs
from quire.runner.verify import verify
from quire.sampling.draft_tree import chain
from quire.sampling.grammars import Grammars
from quire.sampling.sampler import Columns, SeqSample, columns_of
from quire.sampling.sampler import Sampler as Ops
from quire.step import NewSeq, SeqPlan

MAX_TOKENS = 512


def worker_seqs(vocab_size: int, grammars: Grammars | None = None) -> WorkerSeqs:
    grammars = grammars or Grammars("", vocab_size, 1)
    return WorkerSeqs(vocab_size, 64, MAX_TOKENS, max_blocks=1, num_groups=1, grammars=lambda: grammars)


def columns(table: WorkerSeqs, seqs: Sequence[WorkerSeq]) -> Columns:
    """Of one row for the last known token of each, and one for each draft that it verifies."""
    rows, positions = [], []
    for seq in seqs:
        end = int(table.num_tokens[seq.row])
        for position in range(end - seq.num_logits, end):
            rows.append(seq.row)
            positions.append(position)
    return columns_of(table.columns, np.array(rows, np.int64), np.array(positions, np.int64))


class Sampler:
    """Samples for sequences by id, as a worker does in its steps."""

    def __init__(
        self, vocab_size: int, kernels: KernelChoice | None = None, grammars: Grammars | None = None
    ) -> None:
        self.grammars = grammars or Grammars("", vocab_size, 1)
        self.table = worker_seqs(vocab_size, self.grammars)
        self.ops = Ops(vocab_size, kernels)

    def add(self, new: NewSeq) -> WorkerSeq:
        seq = self.table.admit(new)
        assert seq.refusal is None, seq.refusal
        return seq

    def remove(self, seq_id: int) -> None:
        self.table.drop(seq_id)

    def seq(self, seq_id: int) -> WorkerSeq:
        seq = self.table.find(seq_id)
        assert seq is not None
        return seq

    def draft(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """Let the next `sample` verify ``token_ids``: it gets one more row for each."""
        seq = self.seq(seq_id)
        self.table.drafting(seq).drafts = chain(token_ids)
        known = int(self.table.num_tokens[seq.row])
        count = len(token_ids)
        self.table.drafting(seq).take(SeqPlan(seq_id, 0, known - 1, 1 + count, num_draft_tokens=count))

    def sample(self, logits: torch.Tensor, seq_ids: Sequence[int]) -> list[SeqSample]:
        seqs = [self.seq(seq_id) for seq_id in seq_ids]
        samples = verify(logits, seqs, columns(self.table, seqs), self.ops)
        fine = [seq for seq, sample in zip(seqs, samples, strict=True) if sample.error is None]
        self.table.expect(np.array([seq.row for seq in fine], np.int64))
        self.table.settle(fine, [sample for sample in samples if sample.error is None])
        return samples
