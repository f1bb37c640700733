"""Log-probabilities in OpenAI's two formats, from `TokenLogprobs`."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from quire.request import TokenLogprobs
from quire.text.tokenizer import Tokenizer

_FLOOR = -9999.0  # JSON has no -Infinity; OpenAI's servers use this number


class TokenNames:
    """How tokens are written in an answer: their text, or ``token_id:N`` (vLLM's return_tokens_as_token_ids)."""

    __slots__ = ("_as_ids", "_special_ids", "_token_bytes")

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._special_ids = tokenizer.special_token_ids
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        """Return the token's text; bytes that are not UTF-8 on their own become U+FFFD."""
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._token_bytes(token_id).decode("utf-8", "replace")

    def legacy_text(self, token_id: int) -> str:
        """Return the token's text, or ``bytes:\\xNN…`` if it is not UTF-8: as a key it must be unique."""
        if self._as_ids:
            return f"token_id:{token_id}"
        data = self._token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

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


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None], num_top: int, names: TokenNames
) -> list[dict[str, Any] | None]:
    """Return vLLM's form: per token of the prompt ``{id: {logprob, rank, decoded_token}}``, null for the first."""
    return [None if entry is None else _ranked(entry, num_top, names) for entry in entries]


def _ranked(lp: TokenLogprobs, num_top: int, names: TokenNames) -> dict[str, Any]:
    best = zip(lp.top_token_ids[:num_top], lp.top_logprobs[:num_top], strict=True)
    ranked = [(lp.token_id, lp.logprob, lp.rank)]
    ranked += [(i, p, rank) for rank, (i, p) in enumerate(best, 1) if i != lp.token_id]
    return {
        str(i): {"logprob": _finite(p), "rank": rank, "decoded_token": names.text(i)} for i, p, rank in ranked
    }


class CompletionLogprobs:
    """The older format: parallel lists. Keeps the text offset of one choice between chunks."""

    __slots__ = ("_decoder", "_names", "_offset")

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters of the answer before the next token

    def render(self, logprobs: Sequence[TokenLogprobs], into: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return ``{tokens, token_logprobs, top_logprobs, text_offset}`` of the next tokens, added to ``into``."""
        lists = into or {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for lp in logprobs:
            self._add(lists, lp.token_id, _finite(lp.logprob), self._top(lp))
        return lists

    def echo(
        self, entries: Sequence[TokenLogprobs | None], prompt_token_ids: Sequence[int], num_top: int
    ) -> dict[str, Any]:
        """Return the same lists for an echoed prompt, whose first token has no log-probability."""
        lists = self.render(())
        for token_id, lp in zip(prompt_token_ids, entries, strict=True):
            if lp is None:
                self._add(lists, token_id, None, None)
            else:
                lp = lp._replace(
                    top_token_ids=lp.top_token_ids[:num_top], top_logprobs=lp.top_logprobs[:num_top]
                )
                self._add(lists, token_id, _finite(lp.logprob), self._top(lp))
        return lists

    def _add(
        self, lists: dict[str, Any], token_id: int, logprob: float | None, top: dict[str, float] | None
    ) -> None:
        lists["tokens"].append(self._names.legacy_text(token_id))
        lists["token_logprobs"].append(logprob)
        lists["top_logprobs"].append(top)
        lists["text_offset"].append(self._offset)
        if not self._names.is_special(token_id):  # the text of a prompt does not show its BOS
            self._offset += len(self._decoder.decode(self._names.bytes_of(token_id)))

    def _top(self, lp: TokenLogprobs) -> dict[str, float]:
        """Return the alternatives and the sampled token. Of two tokens with the same text, the more likely is shown."""
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
