"""Log-probabilities in OpenAI's two formats, from `TokenLogprobs`."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from quire.request import TokenLogprobs

_FLOOR = -9999.0  # JSON has no -Infinity; OpenAI's servers use this number

TokenBytes = Callable[[int], bytes]


class TokenNames:
    """How tokens are written in an answer: their text, or ``token_id:N`` (vLLM's return_tokens_as_token_ids)."""

    __slots__ = ("_as_ids", "_token_bytes")

    def __init__(self, token_bytes: TokenBytes, *, as_ids: bool) -> None:
        self._token_bytes = token_bytes
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        """The token's text; bytes that are not UTF-8 on their own become U+FFFD."""
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._token_bytes(token_id).decode("utf-8", "replace")

    def legacy_text(self, token_id: int) -> str:
        """The token's text, or ``bytes:\\xNN…`` where it is not UTF-8: a key must tell two such tokens apart."""
        if self._as_ids:
            return f"token_id:{token_id}"
        data = self._token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def bytes_of(self, token_id: int) -> bytes:
        return self._token_bytes(token_id)


def chat_logprobs(logprobs: Sequence[TokenLogprobs], names: TokenNames) -> dict[str, Any]:
    """Return ``{"content": [{token, logprob, bytes, top_logprobs}]}``."""
    return {
        "content": [
            {
                **_entry(lp.token_id, lp.logprob, names),
                "top_logprobs": [
                    _entry(i, p, names) for i, p in zip(lp.top_token_ids, lp.top_logprobs, strict=True)
                ],
            }
            for lp in logprobs
        ]
    }


class CompletionLogprobs:
    """The older format: parallel lists. Keeps the text offset of one choice from chunk to chunk."""

    __slots__ = ("_decoder", "_names", "_offset")

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters of the answer before the next token

    def render(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return ``{tokens, token_logprobs, top_logprobs, text_offset}`` of the next tokens."""
        tokens, token_logprobs, tops, offsets = [], [], [], []
        for lp in logprobs:
            tokens.append(self._names.legacy_text(lp.token_id))
            token_logprobs.append(_finite(lp.logprob))
            tops.append(self._top(lp))
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._names.bytes_of(lp.token_id)))
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top(self, lp: TokenLogprobs) -> dict[str, float]:
        """The alternatives and the drawn token. Of two tokens with one text, the more likely is shown."""
        top: dict[str, float] = {}
        for token_id, logprob in zip(lp.top_token_ids, lp.top_logprobs, strict=True):
            top.setdefault(self._names.legacy_text(token_id), _finite(logprob))
        top.setdefault(self._names.legacy_text(lp.token_id), _finite(lp.logprob))
        return top


def _entry(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names.text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(names.bytes_of(token_id)),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _FLOOR)
