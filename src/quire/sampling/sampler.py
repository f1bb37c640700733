"""`Sampler`: rows of raw logits → one token id per row, exactly, whatever else is in the batch.

Per row: logits processors (`sampling.processors`) → temperature → min_p → top_k → top_p → Gumbel-max (greedy: argmax of
what the masks left). Every step is elementwise, or a comparison, or a reduction in an order fixed by the vocabulary, so
a row has the same bits alone and among 256 others.

Noise is a function of (seed, sample_index, position, token id, purpose) and of nothing else: not of the batch, the
step, the chunk or the number of tokens sampled before. So a sequence that is preempted, restarted or verified against
drafts meets the same noise at the same position again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, from_numpy

from quire.kernels.registry import KernelChoice, choose
from quire.kernels.sampling import (
    COLUMNS,
    EDITED,
    LOGPROBS,
    MIN_P,
    RANDOM,
    SCRATCH_ELEMENTS,
    TRUNCATED,
    sample,
)
from quire.kernels.sampling.logprobs import token_logprobs
from quire.request import Sampling, TokenLogprobs
from quire.sampling.accept import AcceptRule, Draft, probabilities, sample_with_drafts
from quire.step import NewSeq

Columns = NDArray[np.void]  # an array of `kernels.sampling.COLUMNS`

ALL_FORBIDDEN = (
    "no token may be sampled: structured_outputs, allowed_token_ids, bad_words, min_tokens and logit_bias together "
    "forbid every id; loosen one of them."
)
# The purpose of the noise, a word of its counter: noise of another purpose at one position would be independent.
TOKEN_NOISE = 0
NOT_FINITE = "the model's logits are not finite (NaN or infinity): the checkpoint or its dtype is at fault."


class SeqSample(NamedTuple):
    """What one sequence got in a step: accepted drafts and the token after them. With ``error`` it has failed."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one for each of token_ids
    error: str | None = None
    num_tried: int = 0  # levels of drafts up to the first that was rejected, included
    # With an error: the request asked for what cannot be done; the fault may pass.
    of_request: bool = False
    recompute: bool = False


def column_values(new: NewSeq, vocab_size: int, *, edited: bool) -> tuple[float | int, ...]:
    """What the sampling ops read of a sequence, in the order of `COLUMNS`; the position is each row's own."""
    params = new.sampling
    features = EDITED if edited else 0
    if params.num_top_logprobs is not None:
        features |= LOGPROBS
    if not params.greedy:
        assert params.seed is not None, "a request gets its seed at admission"
        features |= RANDOM
        if params.top_p < 1.0 or 0 < params.top_k < vocab_size:
            features |= TRUNCATED
        if params.min_p > 0.0:
            features |= MIN_P
    return (
        features,
        usable_temperature(params),
        params.top_k if 0 < params.top_k < vocab_size else vocab_size,
        params.top_p,
        params.min_p,
        params.seed or 0,
        new.sample_index,
        0,
        params.num_top_logprobs or 0,
    )


def usable_temperature(params: Sampling) -> float:
    """The temperature, or the least that float32 does not round to 0."""
    return max(params.temperature, float(np.finfo(np.float32).tiny))


def columns_of(table: Columns, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> Columns:
    """The columns of logits rows: those of ``rows`` of ``table``; the row at ``positions`` samples the next one."""
    columns: Columns = table.take(rows)
    columns["position"] = positions + 1
    return columns


class Sampler:
    """The sampling ops of a CPU. It keeps nothing of a sequence."""

    def __init__(
        self, vocab_size: int, kernels: KernelChoice | None = None, accept: AcceptRule = "exact"
    ) -> None:
        kernels = kernels or choose()
        self._vocab_size, self.accept = vocab_size, accept
        self._sample, self._token_logprobs = kernels.of(sample), kernels.of(token_logprobs)

    def sample(
        self,
        logits: Tensor,
        columns: Columns,
        edit: Callable[[int, Tensor], None] | None,
        drafts: Mapping[int, Sequence[Draft]] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Sample from ``logits: [rows, vocab] float32``, which are not changed.

        ``edit(row, copy)`` changes a copy of each row that has the feature EDITED, in ascending order; None: no row
        has it. Returns (ids, largest logits); a row whose largest logit is not finite has no valid id. ``drafts`` that
        may follow a row are accepted by the rule ``accept``; for "exact" they change nothing.
        """
        if edit is None and self.accept == "exact":
            return self._sample(logits, {}, columns, TOKEN_NOISE)
        step = columns.size
        if (columns["features"] & EDITED).any():
            step = max(1, SCRATCH_ELEMENTS // self._vocab_size)
        parts = []
        for start in range(0, columns.size, step):
            part = columns[start : start + step]
            edited: dict[int, Tensor] = {}
            for row in np.flatnonzero(part["features"] & EDITED).tolist():
                assert edit is not None
                edited[row] = logits[start + row].clone()
                edit(start + row, edited[row])
            ids, best = self._sample(logits[start : start + step], edited, part, TOKEN_NOISE)
            if drafts and self.accept != "exact":
                ids = self._with_drafts(logits[start : start + step], edited, part, drafts, start, ids, best)
            parts.append((ids, best))
        if len(parts) == 1:
            return parts[0]
        ids, best = zip(*parts, strict=True)
        return np.concatenate(ids), np.concatenate(best)

    def sample_plain(self, logits: Tensor, columns: Columns) -> list[SeqSample] | None:
        """Sample the next token of a sequence per row, whose logits nothing changes; None: some are not finite."""
        ids, best = self._sample(logits, {}, columns, TOKEN_NOISE)
        if not np.isfinite(best).all():
            return None
        token_ids: list[int] = ids.tolist()
        entries = self.logprobs(logits, columns, range(columns.size), token_ids)
        return [
            SeqSample((token_id,), (entries[row],) if row in entries else None)
            for row, token_id in enumerate(token_ids)
        ]

    def _with_drafts(
        self, logits: Tensor, edited: Mapping[int, Tensor], columns: Columns, drafts: Mapping[int, Sequence[Draft]],
        start: int,
        ids: NDArray[np.int64], best: NDArray[np.float32],
    ) -> NDArray[np.int64]:  # fmt: skip
        verifying = [row for row in range(columns.size) if start + row in drafts and np.isfinite(best[row])]
        if not verifying:
            return ids
        scores = torch.stack([edited.get(row, logits[row]) for row in verifying])
        ids = ids.copy()
        own = [drafts[start + row] for row in verifying]
        ids[verifying] = sample_with_drafts(scores, columns[verifying], own, ids[verifying], self.accept)
        return ids

    def probabilities(
        self, logits: Tensor, columns: Columns, edit: Callable[[int, Tensor], None]
    ) -> list[Tensor]:
        """Return the distribution that each row is sampled from, float32 ``[vocab]``; arguments as of `sample`."""
        distributions: list[Tensor] = []
        step = max(1, SCRATCH_ELEMENTS // self._vocab_size)
        for start in range(0, columns.size, step):
            part, scores = columns[start : start + step], logits[start : start + step].clone()
            for row in np.flatnonzero(part["features"] & EDITED).tolist():
                edit(start + row, scores[row])
            distributions += probabilities(scores, part).to(torch.float32)
        return distributions

    def logprobs(
        self, logits: Tensor, columns: Columns, rows: Sequence[int], token_ids: Sequence[int]
    ) -> dict[int, TokenLogprobs]:
        """Row → log-probabilities of its token, for those of ``rows`` of ``logits`` that want them.

        ``token_ids[row]`` is what the row sampled.
        """
        if not np.bitwise_or.reduce(columns["features"]) & LOGPROBS:
            return {}
        wanted = columns["features"] & LOGPROBS
        rows = [row for row in rows if wanted[row]]
        if not rows:
            return {}
        if len(rows) < columns.size:
            logits = logits[from_numpy(np.array(rows, np.int64)).to(logits.device)]
        chosen = from_numpy(np.array([token_ids[row] for row in rows], np.int64)).to(logits.device)
        entries = self._token_logprobs(logits, chosen, columns["num_logprobs"][rows].tolist())
        return dict(zip(rows, entries, strict=True))


def new_columns(size: int) -> Columns:
    """Columns of ``size`` sequences."""
    return np.zeros(size, COLUMNS)
