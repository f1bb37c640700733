"""How tokens become bytes: the decoder of a tokenizer, reduced to one rule per token; and the clean-up of spaces.

A decoder of the `tokenizers` library turns a whole list of tokens into text. A server needs more: the exact bytes of
each token (logprobs, grammars), and text that grows token by token. For every generative model the decoder is a map
from one token to bytes, plus at most one space dropped at the very start; `TokenText` is that rule.

If byte tokens are not UTF-8, each maximal invalid part becomes one U+FFFD, as in Python, Rust and the WHATWG standard.
The `tokenizers` library differs only for byte *fallback*: there one bad byte turns the whole run of byte tokens into
U+FFFD, including its valid characters, which a stream has already sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer as Backend

from quire.errors import UnsupportedModelError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable alphabet: a character for each of the 256 bytes (Radford et al. 2019, `encoder.py`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


BYTE_OF_CHAR: Mapping[str, int] = _byte_level_alphabet()
CHAR_OF_BYTE: Mapping[int, str] = {byte: char for char, byte in BYTE_OF_CHAR.items()}


def byte_level_token(data: bytes) -> str:
    """Spell bytes in GPT-2's printable alphabet, the form in which byte-level vocabularies are written."""
    return "".join([CHAR_OF_BYTE[byte] for byte in data])


@dataclass(frozen=True, slots=True)
class TokenText:
    """The rule that turns one token string into bytes, and what happens at the start of a text."""

    byte_level: bool = False  # GPT-2's printable alphabet
    byte_fallback: bool = False  # "<0x0A>" is the byte 10
    replacements: tuple[tuple[str, str], ...] = ()  # applied in order to the token string, e.g. "▁" -> " "
    # The encoding adds one space at the very start of a text, which decoding drops.
    drops_leading_space: bool = False
    clean_up: bool = False  # " ." -> "." and so on, see `CLEAN_UPS`
    # What begins a token that continues a word (WordPiece); the other tokens begin with a space.
    continues: str = ""

    def to_bytes(self, token: str) -> bytes:
        """Return the bytes that ``token`` stands for, which alone may not be UTF-8."""
        if self.byte_level:
            try:
                return bytes([BYTE_OF_CHAR[char] for char in token])
            except KeyError:
                return token.encode()
        if self.byte_fallback and (match := _BYTE_PIECE.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.continues:
            token = token.removeprefix(self.continues) if token.startswith(self.continues) else f" {token}"
        return token.encode()


def make_token_text(backend: Backend, *, clean_up: bool = False) -> TokenText:
    """Read the rule from the decoder of ``backend``.

    Raises `UnsupportedModelError` for a decoder that is not a map of single tokens (CTC, BPE suffixes): no model that
    Quire runs has one.
    """
    if backend.decoder is None:
        raise UnsupportedModelError(
            "The tokenizer has no decoder, so its tokens cannot be turned into text. Supported decoders: ByteLevel, "
            "Metaspace, and sequences of Replace, ByteFallback, Fuse and Strip. Use the tokenizer.json of the model's "
            "own repository."
        )
    # A decoder exposes its parts only through its pickled form, which is JSON.
    state = json.loads(backend.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    rule = TokenText(clean_up=clean_up)
    fused = False
    for part in parts:
        rule = _with_part(rule, part, fused)
        fused = fused or part["type"] == "Fuse"
    return rule


def _with_part(rule: TokenText, part: Mapping[str, Any], fused: bool) -> TokenText:
    match part:
        case {"type": "ByteLevel"}:
            return replace(rule, byte_level=True)
        case {"type": "ByteFallback"}:
            return replace(rule, byte_fallback=True)
        case {"type": "Fuse"}:
            return rule
        case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
            pairs = (*rule.replacements, (mark, " "))
            return replace(rule, replacements=pairs, drops_leading_space=scheme != "never")
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return replace(rule, replacements=(*rule.replacements, (old, new)))
        case {"type": "WordPiece", "prefix": prefix, "cleanup": cleanup}:
            return replace(rule, continues=prefix, drops_leading_space=True, clean_up=cleanup)
        case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if fused:
            return replace(rule, drops_leading_space=True)
    raise UnsupportedModelError(
        f"The tokenizer's decoder has the part {json.dumps(part)}, which Quire cannot apply token by token. Supported: "
        "ByteLevel, Metaspace, WordPiece, Replace of a string, ByteFallback, Fuse, Strip of a leading space after Fuse."
    )


# The replacements that `clean_up_tokenization_spaces` in tokenizer_config.json means, each applied to the output of the
# one before it. transformers ignores the flag for BPE vocabularies, where it would remove real spaces; so does Quire.
CLEAN_UPS: tuple[tuple[str, str], ...] = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def clean_up(text: str) -> str:
    """Apply the whole chain to a finished text."""
    for old, new in CLEAN_UPS:
        text = text.replace(old, new)
    return text


class CleanUpStream:
    """`clean_up` of a stream: all returned pieces together equal `clean_up` of the whole text.

    Each replacement holds back only the longest tail that could still become its pattern.
    """

    def __init__(self) -> None:
        self._pending = [""] * len(CLEAN_UPS)  # per replacement: a proper prefix of its pattern

    def feed(self, text: str) -> str:
        """Take more text, return the part that is final."""
        for index, (old, new) in enumerate(CLEAN_UPS):
            *done, tail = (self._pending[index] + text).split(old)
            keep = next(n for n in range(min(len(old) - 1, len(tail)), -1, -1) if tail.endswith(old[:n]))
            self._pending[index] = tail[len(tail) - keep :]
            text = new.join([*done, tail[: len(tail) - keep]])
        return text

    def finish(self) -> str:
        """Return what was held back at the end of the text."""
        text = ""
        for index, (old, new) in enumerate(CLEAN_UPS):
            text = (self._pending[index] + text).replace(old, new)
            self._pending[index] = ""
        return text
