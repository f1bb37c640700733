"""Logits processors: what changes the logits of one sequence before temperature, in this order.

    LogitBias    logit_bias is added
    Penalties    repetition_penalty (Keskar et al. 2019, as in HF, vLLM) of prompt and output ids: a positive logit is
                 divided by it, a negative one multiplied; then frequency_penalty * count + presence_penalty (OpenAI)
                 is subtracted from output ids. With repeat_last_n (llama.cpp's) each reads only so many of its last ids
    TokenMask    allowed_token_ids, bad_words, min_tokens and thinking_budget: forbidden ids get −inf
    TypicalP     typical_p: ids of untypical surprise get −inf

The CPU applies the list row by row. On a GPU one kernel does the `fused` ones (`edit_rows` in `kernels.sampling`) and
the others follow. Every operation is elementwise on a row, so a row has the same bits alone and in any batch. The
state of a processor is a function of (prompt ids, output ids, parameters) alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.sampling.typical import keep_typical
from quire.request import Sampling
from quire.sampling.sampler import usable_temperature
from quire.sampling.seq_state import Means, SeqState
from quire.step import NewSeq
from quire.text.constraint import AllowedTokens, BoolMask, TokenConstraint, build_constraints


class LogitsProcessor(Protocol):
    """Changes the logits of one sequence."""

    # On a GPU one kernel does it, together with the others that are fused.
    fused: bool

    def apply(self, row: Tensor) -> None:
        """Change ``row: [vocab_size] float32`` in place."""
        ...


class LogitBias:
    fused = True

    def __init__(self, biases: Mapping[int, float]) -> None:
        self.ids = np.fromiter(biases.keys(), np.int64)
        self.biases = np.fromiter(biases.values(), np.float32)

    def apply(self, row: Tensor) -> None:
        row[_tensor(self.ids, row)] += _tensor(self.biases, row)


class Penalties:
    """All three penalties; it counts the output, except where a GPU does that itself."""

    fused = True

    def __init__(self, new: NewSeq) -> None:
        params = new.sampling
        self.frequency = np.float32(params.frequency_penalty)
        self.presence = np.float32(params.presence_penalty)
        self.repetition = params.repetition_penalty
        self._subtracts = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        self.output = TokenCounts()
        self.seen = TokenCounts()  # prompt and output
        self._output_ids: list[int] = []
        if self.repetition != 1.0:
            for token_id in new.prompt_token_ids:
                self.seen.add(token_id)

    @staticmethod
    def needed(params: Sampling) -> bool:
        penalised = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        return penalised or params.repetition_penalty != 1.0

    def apply(self, row: Tensor) -> None:
        if self.repetition != 1.0:
            ids = _tensor(self.seen.ids, row)
            logits = row[ids]
            row[ids] = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
        if self._subtracts:
            ids = _tensor(self.output.ids, row)
            row[ids] -= _tensor(self.frequency * self.output.counts + self.presence, row)

    def advance(self, token_id: int) -> None:
        self._output_ids.append(token_id)
        if self.repetition != 1.0:
            self.seen.add(token_id)
        if self._subtracts:
            self.output.add(token_id)

    def rollback(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            token_id = self._output_ids.pop()
            if self.repetition != 1.0:
                self.seen.take_back(token_id)
            if self._subtracts:
                self.output.take_back(token_id)


class RecentPenalties:
    """The penalties with ``repeat_last_n``: they read the last ids alone, and need them before the next token."""

    fused = False

    def __init__(self, new: NewSeq) -> None:
        self._params = new.sampling
        self._window = new.sampling.repeat_last_n or 0
        self._num_prompt = len(new.prompt_token_ids)
        self._ids = list(new.prompt_token_ids)

    def apply(self, row: Tensor) -> None:
        params = self._params
        begin = max(0, len(self._ids) - self._window)
        if params.repetition_penalty != 1.0:
            seen = _tensor(np.unique(np.array(self._ids[begin:], np.int64)), row)
            logits = row[seen]
            row[seen] = torch.where(
                logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty
            )
        if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
            output = np.array(self._ids[max(begin, self._num_prompt) :], np.int64)
            ids, counts = np.unique(output, return_counts=True)
            frequency, presence = np.float32(params.frequency_penalty), np.float32(params.presence_penalty)
            row[_tensor(ids, row)] -= _tensor(frequency * counts.astype(np.float32) + presence, row)

    def advance(self, token_id: int) -> None:
        self._ids.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        del self._ids[len(self._ids) - num_tokens :]


class TokenMask:
    """All constraints of one sequence but its grammar, whose mask is computed beside the model (`Grammars`)."""

    fused = True

    def __init__(self, constraints: list[TokenConstraint], vocab_size: int) -> None:
        self._constraints = constraints
        self._vocab_size = vocab_size
        self._fixed = all(isinstance(constraint, AllowedTokens) for constraint in constraints)
        self._bits: NDArray[np.int32] | None = None  # where the mask is the same for every token

    @property
    def reads_ids(self) -> bool:
        """Whether the next token's mask depends on which ids were sampled, and not on their number alone."""
        return any(constraint.reads_ids for constraint in self._constraints)

    def apply(self, row: Tensor) -> None:
        allowed = self._allowed(self._vocab_size)
        if allowed is not None:
            row.masked_fill_(torch.from_numpy(~allowed).to(row.device), -torch.inf)

    def bits(self) -> NDArray[np.int32] | None:
        """A bit for each id that is allowed now, lowest first in words of 32; None where all are."""
        if self._bits is not None:
            return self._bits
        allowed = self._allowed(-(-self._vocab_size // 32) * 32)
        if allowed is None:
            return None
        bits = np.packbits(allowed, bitorder="little").view(np.int32)
        if self._fixed:
            self._bits = bits
        return bits

    def _allowed(self, size: int) -> BoolMask | None:
        """``[size]``, of which the constraints see the vocabulary; None where all ids are allowed."""
        allowed = np.ones(size, np.bool_)
        forbids = [constraint.mask(allowed[: self._vocab_size]) for constraint in self._constraints]
        return allowed if any(forbids) else None

    def advance(self, token_id: int) -> None:
        for constraint in self._constraints:
            constraint.advance(token_id)

    def rollback(self, num_tokens: int) -> None:
        for constraint in self._constraints:
            constraint.rollback(num_tokens)

    def count(self) -> None:
        """A GPU samples a token whose id is not known yet: constraints that do not read its id advance."""
        for constraint in self._constraints:
            if not constraint.reads_ids:
                constraint.advance(-1)

    def follow(self, token_id: int) -> None:
        """The id of a token that was `count`ed before: the other constraints advance."""
        for constraint in self._constraints:
            if constraint.reads_ids:
                constraint.advance(token_id)


class TypicalP:
    fused = False

    def __init__(self, params: Sampling) -> None:
        self._temperature = usable_temperature(params)
        self._typical_p = params.typical_p

    def apply(self, row: Tensor) -> None:
        keep_typical(row, self._temperature, self._typical_p)


class LogitsProcessors(SeqState):
    """The logits processors that one sequence needs, in order. `edit` changes a copy of its row, not the row itself."""

    def __init__(self, new: NewSeq, vocab_size: int) -> None:
        """Build the state after the output of ``new``."""
        params = new.sampling
        constraints = build_constraints(params, vocab_size)
        self.bias = LogitBias(params.logit_bias) if params.logit_bias else None
        penalised = Penalties.needed(params) and params.repeat_last_n != 0
        self.penalties = Penalties(new) if penalised and params.repeat_last_n is None else None
        self._recent = RecentPenalties(new) if penalised and params.repeat_last_n is not None else None
        self.mask = TokenMask(constraints, vocab_size) if constraints else None
        typical = TypicalP(params) if params.typical_p < 1.0 and not params.greedy else None
        self._in_order: list[LogitsProcessor] = [
            processor
            for processor in (self.bias, self.penalties, self._recent, self.mask, typical)
            if processor is not None
        ]
        # Those whose state follows the output ids.
        self._following = [
            processor for processor in (self.penalties, self._recent, self.mask) if processor is not None
        ]
        # What a GPU keeps of them is freed by it.
        self.on_end: Callable[[LogitsProcessors], None] | None = None
        for token_id in new.output_token_ids:
            self.advance(token_id)

    def __bool__(self) -> bool:
        return bool(self._in_order)

    def __iter__(self) -> Iterator[LogitsProcessor]:
        return iter(self._in_order)

    @property
    def reads_ids(self) -> bool:
        """Whether the next token cannot be sampled before the last one's id is on the host."""
        return self._recent is not None or (self.mask is not None and self.mask.reads_ids)

    def count(self) -> None:
        """A GPU samples a token whose id is not known yet (`TokenMask.count`)."""
        if self.mask is not None:
            self.mask.count()

    def follow(self, token_id: int) -> None:
        """The id of a token that was `count`ed before."""
        if self._recent is not None:
            self._recent.advance(token_id)
        if self.mask is not None:
            self.mask.follow(token_id)

    def edit(self, row: Tensor) -> None:
        """Change ``row: [vocab_size] float32`` in place, a copy of the next token's logits."""
        for processor in self._in_order:
            processor.apply(row)

    def advance(self, token_id: int) -> None:
        """Take the next output token."""
        for processor in self._following:
            processor.advance(token_id)

    def rollback(self, num_tokens: int) -> None:
        """Forget the last ``num_tokens`` output tokens (rejected drafts)."""
        for processor in self._following:
            processor.rollback(num_tokens)

    def end(self) -> None:
        if self.on_end is not None:
            self.on_end(self)


def begin(new: NewSeq, means: Means) -> LogitsProcessors | None:
    """Return the logits processors of ``new`` after its output; None: it needs none."""
    processors = LogitsProcessors(new, means.vocab_size)
    return processors if processors else None


class TokenCounts:
    """Distinct ids in order of first appearance with how often each came; one more id is O(1)."""

    def __init__(self) -> None:
        self._place_of: dict[int, int] = {}
        self._ids = np.zeros(64, np.int64)
        self._counts = np.zeros(64, np.float32)

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._place_of)]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: len(self._place_of)]

    def add(self, token_id: int) -> None:
        place = self._place_of.setdefault(token_id, len(self._place_of))
        if place == self._ids.size:
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token_id
        self._counts[place] += 1.0

    def take_back(self, token_id: int) -> None:
        """Undo the last `add`, which was of ``token_id``."""
        place = self._place_of[token_id]
        self._counts[place] -= 1.0
        if self._counts[place] == 0.0:
            assert place == len(self._place_of) - 1
            del self._place_of[token_id]


def _tensor(values: NDArray[np.int64] | NDArray[np.float32], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)
