"""`Tokenizer`: text to ids and back, with the exact bytes of every token; `IncrementalDetokenizer`: ids to text in a
stream.

Both wrap the Rust `tokenizers` library.
"""

from __future__ import annotations

import codecs
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer as Backend

from quire.errors import ModelLoadError, RequestError
from quire.text.token_text import CleanUpStream, TokenText, clean_up


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The named tokens of a model, as texts. ``roles``: the names that chat templates use, such as `bos_token`."""

    roles: Mapping[str, str] = field(default_factory=dict)
    additional: tuple[str, ...] = ()
    end_of_text: tuple[str, ...] = ()  # other tokens that end an answer, such as `<|eot_id|>`


MOST_IDS = 2**24  # tables have an entry per id
INLINE_CHARS = 8192  # a longer text takes more than about 2 ms


class Tokenizer:
    """A vocabulary with its rules. Safe to share between threads.

    ``chat_templates`` maps names to Jinja sources; the name of a model's only template is "default".
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
            backend.model.dropout = None  # dropout is for training; ids must not depend on chance
        added = backend.get_added_tokens_decoder()
        self.text_rule = text_rule
        self.special = special
        self.chat_templates: Mapping[str, str] = dict(chat_templates or {})
        # Not the number of tokens: ids may have gaps.
        self.vocab_size: int = max(backend.get_vocab().values(), default=-1) + 1
        if self.vocab_size > MOST_IDS:
            raise ModelLoadError(
                f"The tokenizer has a token id {self.vocab_size - 1}; at most {MOST_IDS - 1} is allowed."
            )
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_texts = tuple(added[i].content for i in sorted(self.special_token_ids))
        self._backend = backend
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        # Of a text, per token: a bound; 0 without one.
        self._most_characters = max(map(len, backend.get_vocab()), default=0) * characters_kept(backend)
        # `encode_special_tokens` is a setting of the backend, not an argument, so texts are encoded one at a time.
        self._lock = threading.Lock()
        # Held while the setting may not become false; taken before `_lock`.
        self._long_lock = threading.Lock()

    def encode(self, text: str, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """Return the ids of ``text``.

        ``add_special_tokens`` adds what the model expects around a text (usually BOS). With ``allow_special`` false,
        special tokens written in ``text`` are encoded as plain characters, so that untrusted text cannot end a turn.
        Raises `RequestError` for text that is not Unicode (lone surrogates).
        """
        if allow_special and len(text) > INLINE_CHARS:
            return self.encode_long([text], add_special_tokens)[0]
        with nullcontext() if allow_special else self._long_lock, self._lock:
            if self._backend.encode_special_tokens == allow_special:
                self._allow_special(allow_special)
            try:
                ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            except TypeError as error:
                raise _no_unicode() from error
        return ids

    def encode_pair(
        self, first: str, second: str, keep: Callable[[Sequence[int | None]], Sequence[int]] | None = None
    ) -> tuple[list[int], int]:
        """Return the ids of two texts as a model reads them together, and where type 1 begins; 0: nowhere.

        ``keep``: the text of each place, 0 or 1, or None for a mark → the places that are kept.
        """
        with self._long_lock, self._lock:
            self._allow_special(True)
            try:
                encoding = self._backend.encode(first, second)
            except TypeError as error:
                raise _no_unicode() from error
        places = range(len(encoding.ids)) if keep is None else keep(encoding.sequence_ids)
        ids, types = ([values[i] for i in places] for values in (encoding.ids, encoding.type_ids))
        return ids, types.index(1) if 1 in types else 0

    def encode_long(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the ids of each of ``texts``, without holding the interpreter's lock; other threads encode meanwhile.

        Raises:
            RequestError: a text that is not Unicode.
        """
        with self._long_lock:
            with self._lock:
                self._allow_special(True)
            try:
                encoded = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            except TypeError as error:
                raise _no_unicode() from error
            return [encoding.ids for encoding in encoded]

    def _allow_special(self, allow: bool) -> None:
        if self._backend.encode_special_tokens == allow:
            self._backend.encode_special_tokens = not allow

    def min_tokens(self, num_characters: int) -> int:
        """Return a lower bound of the number of tokens of a text; 0 where a token may stand for any text."""
        return -(-num_characters // self._most_characters) if self._most_characters else 0

    def save(self, path: Path) -> None:
        """Write the tokenizer.json from which another process can encode as this one."""
        self._backend.save(str(path), pretty=False)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True, continues: bool = False) -> str:
        """Return the text of ``ids``; ids outside the vocabulary have no text.

        ``continues``: the ids continue an earlier text, so a sentencepiece vocabulary's leading space is kept.
        """
        skip = self.special_token_ids if skip_special_tokens else frozenset()
        data = b"".join([self.token_bytes(token_id) for token_id in ids if token_id not in skip])
        text = data.decode("utf-8", errors="replace")
        if self.text_rule.drops_leading_space and not continues:
            text = text.removeprefix(" ")
        return clean_up(text) if self.text_rule.clean_up else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes of one token, which alone may not be UTF-8. Empty for an id without a token."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._token_bytes(token_id)
        return known

    def _token_bytes(self, token_id: int) -> bytes:
        content = self._added.get(token_id)
        if content is not None and self.text_rule.byte_level:
            return content.encode()  # added tokens are not spelled in the byte alphabet
        token = content if content is not None else self.id_to_token(token_id)
        return b"" if token is None else self.text_rule.to_bytes(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary's own spelling of a token ("Ġthe", "▁the", "<0x0A>"), or None for an unused id."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token in the vocabulary's own spelling, or None."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text; None if the model has none."""
        return self._id_of_role("bos_token")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer according to the tokenizer's own files; `generation_config.json` may name more."""
        names: Sequence[str | None] = (self.special.roles.get("eos_token"), *self.special.end_of_text)
        ids = [self.token_to_id(name) for name in names if name is not None]
        return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))

    def _id_of_role(self, role: str) -> int | None:
        name = self.special.roles.get(role)
        return None if name is None else self.token_to_id(name)


_NFC_CHARACTERS = 4  # Unicode's composition makes one character of at most so many


def characters_kept(backend: Backend) -> int:
    """Return how many characters of a text a token has at most per character of its own; 0: no limit.

    There is no limit where a token stands for unknown text, or takes the spaces beside it.
    """
    added = backend.get_added_tokens_decoder().values()
    if type(backend.model).__name__ != "BPE" or any(token.lstrip or token.rstrip for token in added):
        return 0
    if not backend.model.byte_fallback and "ByteLevel" not in str(backend.pre_tokenizer):
        return 0
    most, left = 1, [] if backend.normalizer is None else [json.loads(backend.normalizer.__getstate__())]
    while left:
        normalizer = left.pop()
        left += normalizer.get("normalizers", [])
        if normalizer["type"] == "NFC":
            most = _NFC_CHARACTERS
        elif normalizer["type"] == "Replace":
            if len(normalizer["pattern"].get("String", "  ")) > max(1, len(normalizer["content"])):
                return 0
        elif normalizer["type"] not in ("Sequence", "Prepend"):
            return 0
    return most


def _no_unicode() -> RequestError:
    return RequestError(
        "The text holds a lone surrogate (half of a character), which no encoding has: send valid Unicode."
    )


_UTF8_DECODER = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Feed ids, get text. All returned pieces and `finish` together equal `Tokenizer.decode` of all ids.

    A character is returned with its last byte. U+FFFD is returned only once it is certain that the bytes are not UTF-8.
    The state is a pure function of the ids, so feeding the same ids again rebuilds it.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues: bool = False
    ) -> None:
        """``continues``: as in `Tokenizer.decode`."""
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._utf8 = _UTF8_DECODER(errors="replace")
        self._at_start = tokenizer.text_rule.drops_leading_space and not continues
        self._clean_up = CleanUpStream() if tokenizer.text_rule.clean_up else None

    def feed(self, token_id: int) -> str:
        """Take one id, return the text that it completed (empty in the middle of a character)."""
        data = b"" if token_id in self._skip else self._tokenizer.token_bytes(token_id)
        return self._emit(self._utf8.decode(data)) if data else ""

    def finish(self) -> str:
        """Return what was held back: an incomplete character as U+FFFD."""
        text = self._emit(self._utf8.decode(b"", final=True))
        return text if self._clean_up is None else text + self._clean_up.finish()

    def _emit(self, text: str) -> str:
        if text and self._at_start:
            self._at_start = False
            text = text.removeprefix(" ")
        return text if self._clean_up is None else self._clean_up.feed(text)
