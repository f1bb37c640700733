"""`IncrementalDetokenizer`: ids in, text out as soon as it is certain, at a cost that does not grow with the answer."""

from __future__ import annotations

import codecs
from bisect import bisect_left

from quire.text.clean_up import CleanUpStream
from quire.text.tokenizer import Tokenizer

_UTF8_DECODER = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Feed ids, get text. The pieces and `finish` add up to `Tokenizer.decode` of all ids, however they are split.

    A character is emitted when its last byte is in; U+FFFD appears only once it is certain that the bytes are not
    UTF-8. The state is a pure function of the ids fed, so feeding the same ids again rebuilds it.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues: bool = False
    ) -> None:
        """``continues``: the text goes on from an earlier one, as in `Tokenizer.decode`."""
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._utf8 = _UTF8_DECODER(errors="replace")
        self._at_start = tokenizer.text_rule.drops_leading_space and not continues
        self._clean_up = CleanUpStream() if tokenizer.text_rule.clean_up else None
        self._ends: list[int] = []  # per token: length of the text emitted up to and with it

    def feed(self, token_id: int) -> str:
        """Take one id, return the text that it completed (often empty in the middle of a character)."""
        data = b"" if token_id in self._skip else self._tokenizer.token_bytes(token_id)
        text = self._emit(self._utf8.decode(data)) if data else ""
        self._ends.append(self.num_chars + len(text))
        return text

    def finish(self) -> str:
        """Return what was still held back: an incomplete character as U+FFFD. It counts to the last token."""
        text = self._emit(self._utf8.decode(b"", final=True))
        if self._clean_up is not None:
            text += self._clean_up.finish()
        if text:
            self._ends[-1] += len(text)
        return text

    def _emit(self, text: str) -> str:
        if text and self._at_start:
            self._at_start = False
            text = text.removeprefix(" ")
        return text if self._clean_up is None else self._clean_up.feed(text)

    @property
    def num_tokens(self) -> int:
        """How many ids were fed."""
        return len(self._ends)

    @property
    def num_chars(self) -> int:
        """How many characters were returned so far."""
        return self._ends[-1] if self._ends else 0

    def num_tokens_to(self, offset: int) -> int:
        """Return how many tokens it took until the first ``offset`` characters were out (0 for 0).

        A stop string that ends at character ``offset`` was completed by token ``num_tokens_to(offset) - 1``.
        """
        assert 0 <= offset <= self.num_chars
        return 0 if offset == 0 else bisect_left(self._ends, offset) + 1
