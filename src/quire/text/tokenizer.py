"""`Tokenizer`: text to ids and back, over the Rust `tokenizers` library, with the exact bytes of every token."""

from __future__ import annotations

import codecs
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer as Backend

from quire.errors import RequestError
from quire.text.token_text import CleanUpStream, TokenText, clean_up


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The named tokens of a model, as texts: ``roles`` is what chat templates see (`bos_token`, `eos_token`, …)."""

    roles: Mapping[str, str] = field(default_factory=dict)
    additional: tuple[str, ...] = ()
    end_of_text: tuple[str, ...] = ()  # tokens that end an answer beside `eos_token`, as `<|eot_id|>`


class Tokenizer:
    """A vocabulary with its rules. Safe to share between threads.

    ``chat_templates`` maps names to Jinja sources; a model with a single template has it under "default".
    """

    def __init__(
        self,
        backend: Backend,
        text_rule: TokenText,
        special: SpecialTokens,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        if hasattr(backend.model, "dropout"):
            backend.model.dropout = None  # dropout is for training; ids must not depend on luck
        added = backend.get_added_tokens_decoder()
        self.text_rule = text_rule
        self.special = special
        self.chat_templates: Mapping[str, str] = dict(chat_templates or {})
        # Not the number of tokens: ids may have gaps.
        self.vocab_size: int = max(backend.get_vocab().values(), default=-1) + 1
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_texts = tuple(added[i].content for i in sorted(self.special_token_ids))
        self._backend = backend
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        # `encode_special_tokens` is a setting of the backend, not an argument: one text at a time.
        self._lock = threading.Lock()

    def encode(self, text: str, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """Return the ids of ``text``.

        ``add_special_tokens`` adds what the model expects around a text (BOS for most). With ``allow_special`` false
        the text of a special token in ``text`` is encoded as plain characters: a stranger's text cannot end a turn.
        Raises `RequestError` for text that is not Unicode (lone surrogates).
        """
        with self._lock:
            if self._backend.encode_special_tokens == allow_special:
                self._backend.encode_special_tokens = not allow_special
            try:
                ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            except TypeError as error:
                raise RequestError(
                    "The text holds a lone surrogate (half of a character), which no encoding has: send valid Unicode."
                ) from error
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True, continues: bool = False) -> str:
        """Return the text of ``ids``; ids outside the vocabulary have no text.

        ``continues``: the ids go on from an earlier text, so that a sentencepiece vocabulary's first space is kept.
        """
        skip = self.special_token_ids if skip_special_tokens else frozenset()
        data = b"".join([self.token_bytes(token_id) for token_id in ids if token_id not in skip])
        text = data.decode("utf-8", errors="replace")
        if self.text_rule.drops_leading_space and not continues:
            text = text.removeprefix(" ")
        return clean_up(text) if self.text_rule.clean_up else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes of one token; they need not be UTF-8 on their own. Empty for an id without a token."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._bytes_of(token_id)
        return known

    def _bytes_of(self, token_id: int) -> bytes:
        content = self._added.get(token_id)
        if content is not None and self.text_rule.byte_level:
            return content.encode()  # added tokens are written as they read, not in the byte alphabet
        token = content if content is not None else self.id_to_token(token_id)
        return b"" if token is None else self.text_rule.to_bytes(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary's own spelling of a token ("Ġthe", "▁the", "<0x0A>"), or None for an unused id."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token in the vocabulary's own spelling, or None."""
        found: int | None = self._backend.token_to_id(token)
        return found

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, if the model has one."""
        return self._id_of_role("bos_token")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer, as far as the tokenizer's own files say; `generation_config.json` may name more."""
        names: Sequence[str | None] = (self.special.roles.get("eos_token"), *self.special.end_of_text)
        ids = [self.token_to_id(name) for name in names if name is not None]
        return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))

    def _id_of_role(self, role: str) -> int | None:
        name = self.special.roles.get(role)
        return None if name is None else self.token_to_id(name)


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
