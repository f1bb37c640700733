"""`Sampler`: one token a row from raw logits, exactly, whatever else is in the batch.

Per row: bias and penalties → masks → typical_p → temperature → min_p → top_k → top_p → Gumbel-max (greedy: argmax of
what the masks left). Every step is elementwise, or a comparison, or a reduction in an order fixed by the vocabulary, so
a row has the same bits alone and among 256 others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.registry import KernelChoice, choose
from quire.kernels.sampling import keep_typical, sample, token_logprobs
from quire.kernels.sampling.reference import EDITED, LOGPROBS
from quire.request import TokenLogprobs
from quire.sampling.batch import RowEdits, SamplerBatch
from quire.sampling.rng import Purpose
from quire.step import NewSeq

Drawn = tuple[
    NDArray[np.int64], NDArray[np.float32]
]  # ids, and the largest logits: not finite where a row failed

_SCRATCH_ELEMENTS = 1 << 22  # rows that need a copy of their logits are taken in slices of this many numbers


class SeqSample(NamedTuple):
    """What one row gave. With ``error`` the sequence has failed and ``token_id`` is −1."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class Sampler:
    """Owns the sampling state of each sequence, and advances it with what it draws."""

    def __init__(self, vocab_size: int, kernels: KernelChoice | None = None) -> None:
        self._vocab_size = vocab_size
        self._kernels = kernels or choose()
        self._batch = SamplerBatch(vocab_size)
        self._mask = np.ones(vocab_size, np.bool_)

    def add(self, new_seq: NewSeq) -> None:
        """Take a sequence, or take it anew: the state is rebuilt from its prompt and output ids.

        Raises `RequestError` where a field of the params names an id outside the vocabulary.
        """
        self._batch.add(new_seq)

    def remove(self, seq_id: int) -> None:
        """Forget a sequence; an unknown id is fine, since a sequence may end before its first admission."""
        if seq_id in self._batch:
            self._batch.remove(seq_id)

    def sample(self, logits: Tensor, seq_ids: Sequence[int]) -> list[SeqSample]:
        """Draw the next token of each of ``seq_ids`` (distinct) from ``logits: [len(seq_ids), vocab] float32``.

        The logits are not changed. A row that holds a NaN, or whose every id is forbidden, gives an error and does
        not advance.
        """
        assert logits.dtype == torch.float32
        assert logits.shape == (len(seq_ids), self._vocab_size)
        if not seq_ids:
            return []
        slots = self._batch.slots(seq_ids)
        columns = self._batch.gather(slots)
        if (columns["features"] & EDITED).any():
            ids, best = self._draw_edited(logits, slots, columns)
        else:
            ids, best = self._draw(logits, {}, columns)
        token_ids: list[int] = ids.tolist()
        failed = np.flatnonzero(~np.isfinite(best))
        if failed.size:
            return self._with_errors(logits, slots, columns, token_ids, failed)
        self._batch.advance(slots, token_ids)
        return self._with_logprobs([SeqSample(token_id) for token_id in token_ids], logits, columns)

    def _draw(self, logits: Tensor, edited: dict[int, Tensor], columns: NDArray[np.void]) -> Drawn:
        backend = self._kernels.backend("sample")
        return sample(logits, edited, columns, purpose=Purpose.DRAW, backend=backend)

    def _draw_edited(self, logits: Tensor, slots: NDArray[np.int64], columns: NDArray[np.void]) -> Drawn:
        """Draw from changed copies of the rows that ask for it, a few at a time."""
        step = max(1, _SCRATCH_ELEMENTS // self._vocab_size)
        parts: list[Drawn] = []
        for start in range(0, columns.size, step):
            part = columns[start : start + step]
            edited: dict[int, Tensor] = {}
            for row in np.flatnonzero(part["features"] & EDITED).tolist():
                edits = self._batch.edits(int(slots[start + row]))
                assert edits is not None
                edited[row] = logits[start + row].clone()
                self._edit(edited[row], edits)
            parts.append(self._draw(logits[start : start + step], edited, part))
        ids, best = zip(*parts, strict=True)
        return np.concatenate(ids), np.concatenate(best)

    def _edit(self, row: Tensor, edits: RowEdits) -> None:
        if edits.penalties is not None:
            edits.penalties.apply(row)
        forbids = [constraint.mask(self._mask) for constraint in edits.constraints]
        if any(forbids):
            row.masked_fill_(torch.from_numpy(~self._mask).to(row.device), -torch.inf)
            self._mask.fill(True)
        if edits.typical is not None:
            keep_typical(row, *edits.typical)

    def _with_errors(
        self,
        logits: Tensor,
        slots: NDArray[np.int64],
        columns: NDArray[np.void],
        token_ids: list[int],
        failed: NDArray[np.int64],
    ) -> list[SeqSample]:
        """The rows in ``failed`` give an error; the others go on as if those were not there."""
        fine = np.setdiff1d(np.arange(slots.size), failed)
        self._batch.advance(slots[fine], [token_ids[row] for row in fine])
        drawn = [SeqSample(token_ids[row]) for row in fine]
        if fine.size:
            drawn = self._with_logprobs(drawn, logits[torch.from_numpy(fine)], columns[fine])
        samples = dict(zip(fine.tolist(), drawn, strict=True))
        for row in failed.tolist():
            raw_is_fine = bool(torch.isfinite(logits[row].amax()))
            samples[row] = SeqSample(-1, error=ALL_FORBIDDEN if raw_is_fine else NOT_FINITE)
        return [samples[row] for row in range(slots.size)]

    def _with_logprobs(
        self, samples: list[SeqSample], logits: Tensor, columns: NDArray[np.void]
    ) -> list[SeqSample]:
        rows = np.flatnonzero(columns["features"] & LOGPROBS)
        if not rows.size:
            return samples
        token_ids = torch.tensor([samples[row].token_id for row in rows], device=logits.device)
        wanted = columns["num_logprobs"][rows].tolist()
        if rows.size < columns.size:
            logits = logits[torch.from_numpy(rows).to(logits.device)]
        found = token_logprobs(logits, token_ids, wanted, backend=self._kernels.backend("token_logprobs"))
        for row, logprobs in zip(rows.tolist(), found, strict=True):
            samples[row] = SeqSample(samples[row].token_id, logprobs)
        return samples


ALL_FORBIDDEN = (
    "no token may be drawn: structured_outputs, allowed_token_ids, bad_words, min_tokens and logit_bias together "
    "forbid every id; loosen one of them."
)
NOT_FINITE = "the model's logits are not finite (NaN or infinity): the checkpoint or its dtype is at fault."
