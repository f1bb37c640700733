"""`Sampler`: one token a row from raw logits, exactly, whatever else is in the batch.

Per row: bias and penalties → masks → temperature → min_p → top_k → top_p → Gumbel-max (greedy: argmax of what the
masks left). Every step is elementwise, or a comparison, or a reduction in an order fixed by the vocabulary, so a row
has the same bits alone and among 256 others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.sampling import Streams, gumbel_argmax, gumbel_argmax_of
from quire.request import TokenLogprobs
from quire.sampling.batch import EDITED, LOGPROBS, MIN_P, RANDOM, TRUNCATED, RowEdits, SamplerBatch
from quire.sampling.logprobs import token_logprobs
from quire.sampling.rng import Purpose
from quire.sampling.truncate import Truncation, apply_min_p, truncate
from quire.step import NewSeq

_SCRATCH_ELEMENTS = 1 << 22  # rows that need a copy of their logits are taken in slices of this many numbers


class SeqSample(NamedTuple):
    """What one row gave. With ``error`` the sequence has failed and ``token_id`` is −1."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class Sampler:
    """Owns the sampling state of each sequence, and advances it with what it draws."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
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
        features = columns["features"]
        worked = np.flatnonzero(features & (RANDOM | EDITED))
        if worked.size < len(seq_ids):
            tokens, best = _argmax(logits)
        else:
            tokens, best = torch.empty_like(logits[:, 0], dtype=torch.int64), torch.empty_like(logits[:, 0])
        step = max(1, _SCRATCH_ELEMENTS // self._vocab_size)
        for start in range(0, worked.size, step):
            rows = worked[start : start + step]
            index = torch.from_numpy(rows)
            tokens[index], best[index] = self._draw(logits[index], slots[rows], columns[rows])
        token_ids: list[int] = tokens.tolist()
        failed = np.flatnonzero(~np.isfinite(best.cpu().numpy()))
        if failed.size:
            return self._with_errors(logits, slots, columns, token_ids, failed)
        self._batch.advance(slots, token_ids)
        return _with_logprobs([SeqSample(token_id) for token_id in token_ids], logits, columns)

    def _draw(
        self, scores: Tensor, slots: NDArray[np.int64], columns: NDArray[np.void]
    ) -> tuple[Tensor, Tensor]:
        """(ids, largest edited logit) of rows with edits or noise; ``scores: [rows, vocab]`` is overwritten."""
        for row in np.flatnonzero(columns["features"] & EDITED).tolist():
            edits = self._batch.edits(int(slots[row]))
            assert edits is not None
            self._edit(scores[row], edits)
        tokens, best = _argmax(scores)
        alive = torch.isfinite(best).cpu().numpy()
        rows = np.flatnonzero((columns["features"] & RANDOM).astype(np.bool_) & alive)
        if rows.size == columns.size:
            return _draw_random(scores, columns), best
        if rows.size:
            index = torch.from_numpy(rows)
            tokens[index] = _draw_random(scores[index], columns[rows])
        return tokens, best

    def _edit(self, row: Tensor, edits: RowEdits) -> None:
        if edits.penalties is not None:
            edits.penalties.apply(row)
        forbids = [constraint.mask(self._mask) for constraint in edits.constraints]
        if any(forbids):
            row.masked_fill_(torch.from_numpy(~self._mask).to(row.device), -torch.inf)
            self._mask.fill(True)

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
            drawn = _with_logprobs(drawn, logits[torch.from_numpy(fine)], columns[fine])
        samples = dict(zip(fine.tolist(), drawn, strict=True))
        for row in failed.tolist():
            raw_is_fine = bool(torch.isfinite(logits[row].amax()))
            samples[row] = SeqSample(-1, error=_ALL_FORBIDDEN if raw_is_fine else _NOT_FINITE)
        return [samples[row] for row in range(slots.size)]


_ALL_FORBIDDEN = (
    "no token may be drawn: structured_outputs, allowed_token_ids, bad_words, min_tokens and logit_bias together "
    "forbid every id; loosen one of them."
)
_NOT_FINITE = "the model's logits are not finite (NaN or infinity): the checkpoint or its dtype is at fault."


def _argmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """(lowest id of the largest score, that score) of each row; a NaN is larger than everything."""
    ids = scores.argmax(dim=1)
    return ids, scores.gather(1, ids[:, None]).squeeze(1)


def _draw_random(scores: Tensor, columns: NDArray[np.void]) -> Tensor:
    """Temperature, truncation and Gumbel-max over ``scores: [rows, vocab]``, which is overwritten."""
    features = columns["features"]
    scores.sub_(scores.amax(dim=1, keepdim=True))  # so that no temperature, however small, overflows
    scores.div_(_column(columns, "temperature", scores)[:, None])
    streams = Streams(
        _column(columns, "seed", scores),
        _column(columns, "sample_index", scores),
        _column(columns, "position", scores),
        Purpose.DRAW,
    )
    limits = Truncation(*(_column(columns, name, scores) for name in ("top_k", "top_p", "min_p")))
    rows = torch.from_numpy(np.flatnonzero(features & MIN_P)).to(scores.device)
    if rows.numel():
        scores[rows] = apply_min_p(scores[rows], limits.min_p[rows])
    truncated = (features & TRUNCATED).astype(np.bool_)
    if not truncated.any():
        return gumbel_argmax(scores, streams)
    tokens = torch.empty(columns.size, dtype=torch.int64, device=scores.device)
    rows = torch.from_numpy(np.flatnonzero(truncated)).to(scores.device)
    tokens[rows] = gumbel_argmax_of(*truncate(scores[rows], limits.take(rows)), streams.take(rows))
    rows = torch.from_numpy(np.flatnonzero(~truncated)).to(scores.device)
    if rows.numel():
        tokens[rows] = gumbel_argmax(scores[rows], streams.take(rows))
    return tokens


def _column(columns: NDArray[np.void], name: str, like: Tensor) -> Tensor:
    return torch.from_numpy(columns[name].copy()).to(like.device)


def _with_logprobs(samples: list[SeqSample], logits: Tensor, columns: NDArray[np.void]) -> list[SeqSample]:
    rows = np.flatnonzero(columns["features"] & LOGPROBS)
    if not rows.size:
        return samples
    token_ids = torch.tensor([samples[row].token_id for row in rows], device=logits.device)
    wanted = columns["num_logprobs"][rows].tolist()
    found = token_logprobs(logits[torch.from_numpy(rows).to(logits.device)], token_ids, wanted)
    for row, logprobs in zip(rows.tolist(), found, strict=True):
        samples[row] = SeqSample(samples[row].token_id, logprobs)
    return samples
