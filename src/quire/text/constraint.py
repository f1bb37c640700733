"""`TokenConstraint`: which token ids may come next. Every feature that forbids ids is one.

allowed_token_ids, bad_words, min_tokens and thinking budgets are here; grammars implement the same protocol. The state
of a constraint is a function of the output ids alone, so a new constraint that is advanced over them equals the old
one. Torch-free: masks are numpy arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.request import Sampling, ThinkingBudget

BoolMask = NDArray[np.bool_]


class TokenConstraint(Protocol):
    """Forbids ids for the next token of one sequence."""

    @property
    def reads_ids(self) -> bool:
        """Whether the mask depends on which ids were sampled, and not only on how many."""
        ...

    def mask(self, allowed: BoolMask) -> bool:
        """Clear the forbidden ids in ``allowed: [vocab_size]``; return whether it forbids anything now."""
        ...

    def advance(self, token_id: int) -> None:
        """Take the next output token."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Forget the last ``num_tokens`` output tokens (rejected drafts)."""
        ...


class AllowedTokens:
    """allowed_token_ids: no other id may be sampled."""

    reads_ids = False

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ids = np.unique(np.asarray(token_ids, np.int64))

    def mask(self, allowed: BoolMask) -> bool:
        before = allowed[self._ids].copy()
        allowed[:] = False
        allowed[self._ids] = before
        return True

    def advance(self, token_id: int) -> None:
        """The same ids are allowed at every position."""

    def rollback(self, num_tokens: int) -> None:
        """The same ids are allowed at every position."""


class BadWords:
    """bad_words: the output may not complete any of the id sequences in ``words`` (as in vLLM)."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self._words = [tuple(word) for word in words if word]
        self.reads_ids = any(len(word) > 1 for word in self._words)
        self._output: list[int] = []

    def mask(self, allowed: BoolMask) -> bool:
        banned = [word[-1] for word in self._words if self._ends_with(word[:-1])]
        allowed[banned] = False
        return bool(banned)

    def _ends_with(self, prefix: tuple[int, ...]) -> bool:
        return not prefix or tuple(self._output[-len(prefix) :]) == prefix

    def advance(self, token_id: int) -> None:
        self._output.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens <= len(self._output)
        del self._output[len(self._output) - num_tokens :]


class MinTokens:
    """min_tokens: no EOS and no stop id before that many output tokens."""

    reads_ids = False

    def __init__(self, min_tokens: int, banned_ids: Iterable[int]) -> None:
        self._min_tokens = min_tokens
        self._banned = sorted(set(banned_ids))
        self._num_output = 0

    def mask(self, allowed: BoolMask) -> bool:
        if self._num_output >= self._min_tokens:
            return False
        allowed[self._banned] = False
        return bool(self._banned)

    def advance(self, token_id: int) -> None:
        self._num_output += 1

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens <= self._num_output
        self._num_output -= num_tokens


class ThinkingLimit:
    """thinking_budget: after that many reasoning tokens, the next token must be the end mark.

    Reasoning that begins again goes on counting, so with a used-up budget it ends immediately.
    """

    reads_ids = True

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        # After each output token: whether it is inside reasoning, and the number of reasoning tokens so far.
        self._states: list[tuple[bool, int]] = [(budget.is_open, 0)]

    def mask(self, allowed: BoolMask) -> bool:
        inside, num_tokens = self._states[-1]
        if not inside or num_tokens < self._budget.num_tokens:
            return False
        allowed_end = bool(allowed[self._budget.end_id])
        allowed[:] = False
        allowed[self._budget.end_id] = allowed_end
        return True

    def advance(self, token_id: int) -> None:
        inside, num_tokens = self._states[-1]
        if inside and token_id == self._budget.end_id:
            self._states.append((False, num_tokens))
        elif inside:
            self._states.append((True, num_tokens + 1))
        else:
            self._states.append((token_id == self._budget.begin_id, num_tokens))

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens < len(self._states)
        del self._states[len(self._states) - num_tokens :]


def build_constraints(params: Sampling, vocab_size: int) -> list[TokenConstraint]:
    """Return the constraints that ``params`` asks for, before any output token.

    Stop ids beyond the vocabulary are never sampled, and some checkpoints list such EOS ids: they are ignored.
    """
    constraints: list[TokenConstraint] = []
    if params.allowed_token_ids is not None:
        constraints.append(AllowedTokens(params.allowed_token_ids))
    if params.bad_words_token_ids:
        constraints.append(BadWords(params.bad_words_token_ids))
    if params.min_tokens > 0:
        ends = (*params.eos_token_ids, *params.stop_token_ids)
        constraints.append(MinTokens(params.min_tokens, (i for i in ends if i < vocab_size)))
    if params.thinking_budget is not None:
        constraints.append(ThinkingLimit(params.thinking_budget))
    return constraints
