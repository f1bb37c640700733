"""`TokenTable`: the vocabulary as a grammar's matcher sees it, in plain values that cross to a helper process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.text.tokenizer import Tokenizer


class TokenTable(NamedTuple):
    """The vocabulary for llguidance. ``tokens[id]``: the exact bytes; empty for an id without a token, which no grammar
    allows.
    """

    tokens: Sequence[bytes]
    special_ids: Sequence[int]
    eos_ids: Sequence[int]


def token_table(tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> TokenTable:
    """Return the table of the model's ``vocab_size`` ids; the tokenizer may have more or fewer."""
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
    eos = tuple(token_id for token_id in eos_ids if token_id < vocab_size)
    # An id that ends the answer must not count as the text that spells it.
    special = {i for i in tokenizer.special_token_ids if i < vocab_size} | set(eos)
    for token_id in special:
        tokens[token_id] = tokens[token_id] or b"<%d>" % token_id
    return TokenTable(tokens, sorted(special), eos)
