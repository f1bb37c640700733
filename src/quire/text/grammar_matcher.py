"""`GrammarConstraint`: a compiled grammar as a `TokenConstraint`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.text.constraint import BoolMask

TOO_COMPLEX = "the grammar became too complex to follow at this point of the answer"


def first_error(matcher: Any) -> str:
    """Return what is wrong with a grammar, or an empty string. The first mask is computed on a copy."""
    if matcher.is_error():
        return str(matcher.get_error())
    trial = matcher.deep_copy()
    if not any(trial.compute_bitmask()):
        return "no token of the model's vocabulary can begin such an answer"
    return str(trial.get_error())


def bitmask_words(vocab_size: int) -> int:
    """Words of 32 bits in a mask over ``vocab_size`` ids."""
    return -(-vocab_size // 32)


class GrammarConstraint:
    """One sequence's place in a grammar. Its EOS ids are allowed where the grammar is complete, and only there."""

    def __init__(self, matcher: Any, vocab_size: int, output_token_ids: Sequence[int] = ()) -> None:
        """Take over ``matcher``, which stands at the start, and follow it through ``output_token_ids``."""
        self.matcher = matcher
        self._bits = np.zeros(bitmask_words(vocab_size), np.int32)
        self._vocab_size = vocab_size
        if output_token_ids:
            matcher.consume_tokens(list(output_token_ids))

    @property
    def error(self) -> str | None:
        """Why the sequence cannot go on: a limit of the compiler, or a token that the grammar does not allow."""
        if not self.matcher.is_error():
            return None
        reason = self.matcher.stop_reason()
        if reason in ("ParserTooComplex", "LexerTooComplex"):
            return f"{TOO_COMPLEX} ({reason})"
        return f"{TOO_COMPLEX}: {self.matcher.get_error()}"

    def mask(self, allowed: BoolMask) -> bool:
        """As `TokenConstraint.mask`; nothing is allowed after an error."""
        self.matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        allowed &= unpack(self._bits[None], self._vocab_size)[0] if self.error is None else False
        return True

    def advance(self, token_id: int) -> None:
        """As `TokenConstraint.advance`."""
        self.matcher.consume_token(token_id)

    def rollback(self, num_tokens: int) -> None:
        """As `TokenConstraint.rollback`."""
        if num_tokens:
            self.matcher.rollback(num_tokens)


def unpack(bits: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """``bits: [rows, words]`` → bool ``[rows, vocab_size]``."""
    rows = np.unpackbits(bits.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    return rows.view(np.bool_)
