"""The assembler of answers: the text of one answer as parts — reasoning, text, calls — in the order of the model.

Every conversation's answer is taken apart here; each endpoint only renders the events that `Assembler` yields.
Log-probabilities, in OpenAI's two formats, are below.
"""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from quire.api.tools import OutputPlan
from quire.engine.output import OutputChunk
from quire.request import FinishReason, TokenLogprobs
from quire.text.output import CallDelta, ContentDelta, Delta
from quire.text.tokenizer import IncrementalDetokenizer, Tokenizer


class Kind(StrEnum):
    """The kind of a part."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Part:
    """A part so far. ``text``: of a call its arguments (JSON if the model writes JSON)."""

    kind: Kind
    index: int  # among the parts of the answer
    text: str = ""
    name: str = ""  # of a call
    id: str = ""  # of a call
    call: int = 0  # of a call: its index among the calls


class Event(NamedTuple):
    """A part opens, gains text, or closes. Each opens once and closes once, before the next one opens."""

    verb: str  # "open" | "more" | "close"
    part: Part
    text: str = ""


class Assembler:
    """Takes the text of one answer in pieces; ``plan`` None: all of it is text."""

    def __init__(self, plan: OutputPlan | None, new_call_id: Callable[[], str]) -> None:
        self.parts: list[Part] = []
        self.num_calls = 0
        self._plan = plan
        self._parser = None if plan is None else plan.parser()
        self._new_call_id = new_call_id
        self._is_open = False

    def feed(self, text: str, *, last: bool) -> list[Event]:
        """Take more text; ``last`` ends the answer."""
        events: list[Event] = []
        for delta in self._deltas(text, last):
            self._add(events, delta)
        if last:
            self._close(events)
        return events

    def text(self, kind: Kind) -> str:
        """Return the text of all parts of one kind."""
        return "".join([part.text for part in self.parts if part.kind is kind])

    def _deltas(self, text: str, last: bool) -> list[Delta]:
        if self._parser is None:
            return [ContentDelta(text)]
        deltas = self._parser.feed(text) if text else []
        return deltas + self._parser.finish() if last else deltas

    def _add(self, events: list[Event], delta: Delta) -> None:
        plan = self._plan
        if isinstance(delta, CallDelta):
            assert plan is not None
            if plan.max_calls is not None and delta.call >= plan.max_calls:
                return
            if delta.name is not None:
                self._open(events, Kind.CALL, delta.name, delta.id or self._new_call_id())
                self.num_calls += 1
            self._more(events, delta.arguments)
            return
        kind = Kind.TEXT if isinstance(delta, ContentDelta) else Kind.REASONING
        if not delta.text or (kind is Kind.REASONING and plan is not None and not plan.with_reasoning):
            return
        if not self._is_open or self.parts[-1].kind is not kind:
            self._open(events, kind)
        self._more(events, delta.text)

    def _open(self, events: list[Event], kind: Kind, name: str = "", call_id: str = "") -> None:
        self._close(events)
        self.parts.append(Part(kind, len(self.parts), name=name, id=call_id, call=self.num_calls))
        self._is_open = True
        events.append(Event("open", self.parts[-1]))

    def _more(self, events: list[Event], text: str) -> None:
        if text:
            self.parts[-1].text += text
            events.append(Event("more", self.parts[-1], text))

    def _close(self, events: list[Event]) -> None:
        if self._is_open:
            self._is_open = False
            events.append(Event("close", self.parts[-1]))


class TextLogprobs:
    """The log-probabilities of the tokens of text parts, by the index of the part.

    Tokens of reasoning, of calls and of the marks around them are left out. The part of a token depends only on the
    tokens up to it, so a stream and a whole answer agree. Without ``names`` all lists are empty.
    """

    def __init__(
        self,
        names: TokenNames | None,
        plan: OutputPlan | None,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
    ) -> None:
        self._names = names
        self._assembler = Assembler(plan, str)
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._entries: dict[int, list[Any]] = defaultdict(list)
        self._held: list[tuple[Any, str]] = []  # tokens, with their text, that no part has received yet
        self._num_sent: dict[int, int] = defaultdict(int)

    def feed(self, chunk: OutputChunk) -> None:
        """Take the tokens of a chunk, in order."""
        if self._names is None or chunk.logprobs is None:
            return
        entries = chat_logprobs(chunk.logprobs, self._names)["content"]
        token_ids = list(chunk.token_ids)
        if chunk.finish_reason is FinishReason.STOP and not isinstance(chunk.stop_reason, str):
            del token_ids[-1:]  # the token that ended the answer has no text
        for token_id, entry in zip(token_ids, entries, strict=False):
            text = self._detokenizer.feed(token_id)
            self._held.append((entry, text))
            if text:
                self._settle(self._assembler.feed(text, last=False))
        if chunk.finish_reason is not None:
            self._settle(self._assembler.feed(self._detokenizer.finish(), last=True))

    def _settle(self, events: list[Event]) -> None:
        """Give the tokens of each event's text to its part, and drop the tokens of marks before it."""
        for event in events:
            if event.verb != "more":
                continue
            start = "".join([text for _, text in self._held]).find(event.text)
            if start < 0:  # the parser rewrote a call's arguments
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
                    # A token that spans two parts belongs to the first.
                    rest.append((None, text[end - first :]))
            self._held = rest

    def of(self, index: int) -> list[Any]:
        """Return all entries of a part so far."""
        return list(self._entries[index])

    def take(self, index: int) -> list[Any]:
        """Return the entries of a part that no event has carried yet."""
        entries, first = self._entries[index], self._num_sent[index]
        self._num_sent[index] = len(entries)
        return entries[first:]


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
