"""Per-sequence sampler state: numbers as columns (gathered for a whole step at once), the rest as objects."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.kernels.sampling.reference import COLUMNS, EDITED, LOGPROBS, MIN_P, RANDOM, TRUNCATED
from quire.request import Sampling
from quire.sampling.penalties import Penalties, penalties_of
from quire.step import NewSeq
from quire.text.constraint import AllowedTokens, TokenConstraint, build_constraints, check_token_ids


class RowEdits:
    """What changes the logits of one sequence before temperature: penalties, then constraints, then typical_p."""

    def __init__(
        self,
        penalties: Penalties | None,
        constraints: list[TokenConstraint],
        typical: tuple[float, float] | None,
    ) -> None:
        self.penalties = penalties
        self.constraints = constraints
        self.typical = typical  # (temperature, typical_p)

        self._bits: NDArray[np.int32] | None = None  # of ids that stay the same

    @property
    def reads_ids(self) -> bool:
        """Whether the next token's mask depends on which ids were drawn, and not on their number alone."""
        return any(constraint.reads_ids for constraint in self.constraints)

    def advance(self, token_id: int) -> None:
        if self.penalties is not None:
            self.penalties.advance(token_id)
        for constraint in self.constraints:
            constraint.advance(token_id)

    def count(self) -> None:
        """A device draws a token, and counts it for the penalties; constraints that do not read its id go on."""
        for constraint in self.constraints:
            if not constraint.reads_ids:
                constraint.advance(-1)

    def follow(self, token_id: int) -> None:
        """The id of a token that was `count`ed before."""
        for constraint in self.constraints:
            if constraint.reads_ids:
                constraint.advance(token_id)

    def mask_bits(self, vocab_size: int) -> NDArray[np.int32] | None:
        """A bit for each id that is allowed now, lowest first in words of 32; None where all are."""
        if self._bits is not None or not self.constraints:
            return self._bits
        allowed = np.ones(-(-vocab_size // 32) * 32, np.bool_)
        forbids = [constraint.mask(allowed[:vocab_size]) for constraint in self.constraints]
        if not any(forbids):
            return None
        bits = np.packbits(allowed, bitorder="little").view(np.int32)
        if all(isinstance(constraint, AllowedTokens) for constraint in self.constraints):
            self._bits = bits
        return bits


class SamplerBatch:
    """State of every sequence the sampler knows; a function of (prompt ids, output ids, params) alone."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._columns = np.zeros(64, COLUMNS)
        self._slot_of: dict[int, int] = {}
        self._free = list(range(63, -1, -1))
        self._edits: dict[int, RowEdits] = {}  # by slot

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._slot_of

    def add(self, seq: NewSeq) -> None:
        """Build the state of ``seq``, replacing what an earlier epoch left. `RequestError` on an id out of range."""
        check_token_ids(seq.sampling, self._vocab_size)
        if seq.seq_id in self._slot_of:
            self.remove(seq.seq_id)
        if not self._free:
            size = self._columns.size
            self._columns = np.concatenate((self._columns, np.zeros(size, COLUMNS)))
            self._free = list(range(2 * size - 1, size - 1, -1))
        slot = self._free.pop()
        self._slot_of[seq.seq_id] = slot
        edits = _edits_of(seq, self._vocab_size)
        if edits is not None:
            self._edits[slot] = edits
        self._columns[slot] = _column_values(seq, edits is not None, self._vocab_size)

    def remove(self, seq_id: int) -> None:
        slot = self._slot_of.pop(seq_id)
        self._edits.pop(slot, None)
        self._free.append(slot)

    def slots(self, seq_ids: Sequence[int]) -> NDArray[np.int64]:
        return np.fromiter(map(self._slot_of.__getitem__, seq_ids), np.int64, len(seq_ids))

    def gather(self, slots: NDArray[np.int64]) -> NDArray[np.void]:
        """A copy of the columns of ``slots``: a structured array ``[rows]``."""
        return self._columns[slots]

    def edits(self, slot: int) -> RowEdits | None:
        return self._edits.get(slot)

    def edits_of(self, seq_ids: Sequence[int]) -> list[RowEdits | None]:
        return [self._edits.get(self._slot_of[seq_id]) for seq_id in seq_ids]

    def count(self, slots: NDArray[np.int64]) -> None:
        """Count a token of each slot that a device draws; its id is not known yet."""
        self._columns["position"][slots] += 1
        if self._edits:
            for slot in slots.tolist():
                if slot in self._edits:
                    self._edits[slot].count()

    def advance(self, slots: NDArray[np.int64], token_ids: Sequence[int]) -> None:
        """Append the drawn ids to their sequences. A slot may not come twice."""
        self._columns["position"][slots] += 1
        if self._edits:
            for slot, token_id in zip(slots.tolist(), token_ids, strict=True):
                if slot in self._edits:
                    self._edits[slot].advance(token_id)


def _edits_of(seq: NewSeq, vocab_size: int) -> RowEdits | None:
    constraints = build_constraints(seq.sampling, vocab_size)
    penalties = penalties_of(seq.sampling, seq.prompt_token_ids, seq.output_token_ids)
    params = seq.sampling
    typical = (
        (_temperature(params), params.typical_p) if params.typical_p < 1.0 and not params.greedy else None
    )
    if penalties is None and not constraints and typical is None:
        return None
    for constraint in constraints:
        for token_id in seq.output_token_ids:
            constraint.advance(token_id)
    return RowEdits(penalties, constraints, typical)


def _column_values(seq: NewSeq, edited: bool, vocab_size: int) -> tuple[float | int, ...]:
    params = seq.sampling
    features = EDITED if edited else 0
    if params.num_top_logprobs is not None:
        features |= LOGPROBS
    if not params.greedy:
        assert params.seed is not None, "a request gets its seed at admission"
        features |= RANDOM | _truncation_features(params, vocab_size)
    return (
        features,
        _temperature(params),
        params.top_k if 0 < params.top_k < vocab_size else vocab_size,
        params.top_p,
        params.min_p,
        params.seed or 0,
        seq.sample_index,
        len(seq.prompt_token_ids) + len(seq.output_token_ids),
        params.num_top_logprobs or 0,
    )


def _temperature(params: Sampling) -> float:
    """One that float32 does not round to 0."""
    return max(params.temperature, float(np.finfo(np.float32).tiny))


def _truncation_features(params: Sampling, vocab_size: int) -> int:
    truncated = params.top_p < 1.0 or 0 < params.top_k < vocab_size
    return (TRUNCATED if truncated else 0) | (MIN_P if params.min_p > 0.0 else 0)
