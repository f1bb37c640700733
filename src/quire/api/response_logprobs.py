"""``include: ["message.output_text.logprobs"]``: which tokens of an answer are its text.

Reasoning, calls and the marks around them have tokens too; those are not given out. Whose a token is, is a function of
the tokens up to it alone, so a stream and a whole answer agree however the text was held back or put together.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from quire.api.answer_parts import AnswerParts, Event, Kind
from quire.api.logprobs import TokenNames, chat_logprobs
from quire.api.tools import OutputPlan
from quire.engine.output import OutputChunk
from quire.request import FinishReason
from quire.text.tokenizer import IncrementalDetokenizer, Tokenizer


class TextLogprobs:
    """Entries by the index of their part. ``names`` None: not asked for, and all lists are empty."""

    def __init__(
        self,
        names: TokenNames | None,
        plan: OutputPlan | None,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
    ) -> None:
        self._names = names
        self._parts = AnswerParts(plan, str)
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._entries: dict[int, list[Any]] = defaultdict(list)
        self._held: list[tuple[Any, str]] = []  # tokens, with their text, of which no part has had anything
        self._num_sent: dict[int, int] = defaultdict(int)

    def feed(self, chunk: OutputChunk) -> None:
        """Take the tokens of a chunk, in order."""
        if self._names is None or chunk.logprobs is None:
            return
        entries = chat_logprobs(chunk.logprobs, self._names)["content"]
        token_ids = list(chunk.token_ids)
        if chunk.finish_reason is FinishReason.STOP and not isinstance(chunk.stop_reason, str):
            del token_ids[-1:]  # the token that ended the answer is no text
        for token_id, entry in zip(token_ids, entries, strict=False):
            text = self._detokenizer.feed(token_id)
            self._held.append((entry, text))
            if text:
                self._settle(self._parts.feed(text, last=False))
        if chunk.finish_reason is not None:
            self._settle(self._parts.feed(self._detokenizer.finish(), last=True))

    def _settle(self, events: list[Event]) -> None:
        """Give the tokens whose text came out to its part; those of marks before it are nobody's."""
        for event in events:
            if event.verb != "more":
                continue
            start = "".join([text for _, text in self._held]).find(event.text)
            if start < 0:  # arguments are written anew
                self._held = []
                continue
            end, at = start + len(event.text), 0
            rest: list[tuple[Any, str]] = []
            for entry, text in self._held:
                first, at = at, at + len(text)
                if at <= start and first < start:
                    continue
                if first >= end:
                    rest.append((entry, text))
                    continue
                if entry is not None and event.part.kind is Kind.TEXT:
                    self._entries[event.part.index].append(entry)
                if at > end:
                    rest.append((None, text[end - first :]))  # a token that reaches over is the first part's
            self._held = rest

    def of(self, index: int) -> list[Any]:
        """Every entry of a part so far."""
        return list(self._entries[index])

    def take(self, index: int) -> list[Any]:
        """The entries of a part that no event has had yet."""
        entries, first = self._entries[index], self._num_sent[index]
        self._num_sent[index] = len(entries)
        return entries[first:]
