"""The vocabulary as llguidance wants it: the exact bytes of every id, which ids are special, which ones end a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.text.tokenizer import Tokenizer

Encode = Callable[[str], list[int]]


class TokenTable(NamedTuple):
    """``tokens[id]`` are bytes; empty for an id without a token, which no grammar can then draw."""

    tokens: Sequence[bytes]
    special_ids: Sequence[int]
    eos_ids: Sequence[int]


def token_table(tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> TokenTable:
    """Return the table of the model's ``vocab_size`` ids, which may be more or fewer than the tokenizer's."""
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
    eos = tuple(token_id for token_id in eos_ids if token_id < vocab_size)
    # An id that ends the answer may not be drawn as the text that it is spelled with.
    special = {i for i in tokenizer.special_token_ids if i < vocab_size} | set(eos)
    for token_id in special:
        tokens[token_id] = tokens[token_id] or b"<%d>" % token_id
    return TokenTable(tokens, sorted(special), eos)


def encode_forced(tokenizer: Tokenizer) -> Encode:
    """Return how ``tokenizer`` writes a piece in the middle of a text: no BOS, no special tokens, no first space."""
    mark = "\n" if tokenizer.text_rule.drops_leading_space else ""

    def encode(text: str) -> list[int]:
        ids = tokenizer.encode(mark + text, add_special_tokens=False, allow_special=False)
        if mark:
            head = b""
            while ids and not head.endswith(b"\n"):
                head += tokenizer.token_bytes(ids.pop(0))
        return ids

    return encode
