"""Log-probabilities in an answer, in OpenAI's two formats and vLLM's for those of a prompt; how tokens are written."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.engine.output import OutputChunk
from quire.request import TokenLogprobs
from quire.text.tokenizer import Tokenizer

FLOOR = -9999.0  # JSON has no -Infinity; OpenAI's servers use this number


class TokenNames(NamedTuple):
    """How tokens are written in an answer: their text, or ``token_id:N`` (vLLM's return_tokens_as_token_ids)."""

    tokenizer: Tokenizer
    as_ids: bool

    def text(self, token_id: int) -> str:
        """Return the token's text; bytes that are not UTF-8 on their own become U+FFFD."""
        if self.as_ids:
            return f"token_id:{token_id}"
        return self.tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def legacy_text(self, token_id: int) -> str:
        """Return the token's text, or ``bytes:\\xNN…`` if it is not UTF-8: as a key it must be unique."""
        if self.as_ids:
            return f"token_id:{token_id}"
        data = self.tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


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


def prompt_logprobs(chunk: OutputChunk, num_top: int | None, names: TokenNames) -> dict[str, Any]:
    """Return the field ``prompt_logprobs`` if the chunk has them and ``num_top`` of them are asked for.

    It is vLLM's form: per token of the prompt ``{id: {logprob, rank, decoded_token}}``, null for the first.
    """
    entries = chunk.prompt_logprobs
    if entries is None or num_top is None:
        return {}
    ranked = [None if entry is None else _ranked(entry, num_top, names) for entry in entries]
    return {"prompt_logprobs": ranked}


def _ranked(lp: TokenLogprobs, num_top: int, names: TokenNames) -> dict[str, Any]:
    best = zip(lp.top_token_ids[:num_top], lp.top_logprobs[:num_top], strict=True)
    ranked = [(lp.token_id, lp.logprob, lp.rank)]
    ranked += [(i, p, rank) for rank, (i, p) in enumerate(best, 1) if i != lp.token_id]
    return {
        str(i): {"logprob": _finite(p), "rank": rank, "decoded_token": names.text(i)} for i, p, rank in ranked
    }


@dataclass(slots=True, eq=False)
class CompletionLogprobs:
    """The older format: parallel lists. Keeps the text offset of one choice between chunks."""

    _names: TokenNames
    _offset: int = 0  # characters before the next token
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

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
        tokenizer = self._names.tokenizer
        if token_id not in tokenizer.special_token_ids:  # the text of a prompt does not show its BOS
            self._offset += len(self._decoder.decode(tokenizer.token_bytes(token_id)))

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
        "bytes": list(names.tokenizer.token_bytes(token_id)),
    }


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR)
