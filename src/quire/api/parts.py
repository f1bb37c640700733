"""Answers: the text of one answer as parts — reasoning, text, calls — and the choices of OpenAI's completions.

Every conversation's answer is taken apart by `Assembler`; each endpoint only renders the events that it yields.
Log-probabilities, in OpenAI's two formats, and `ChoicesAnswer` are below: a chunk's bytes are put together from parts
encoded once per stream; pydantic is not involved, and a plain text delta costs one string encoding.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec

from quire.api.conversation import OutputPlan
from quire.api.job import Answer, Head, Usage
from quire.api.protocol import StreamOptions
from quire.engine.output import OutputChunk
from quire.http.body import STREAM_DONE
from quire.http.refusals import Refusal
from quire.request import FinishReason, TokenLogprobs
from quire.text.output.formats import CallDelta, ContentDelta, Delta
from quire.text.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode


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

    def __init__(self, plan: OutputPlan | None, call_id: Callable[[int], str]) -> None:
        """``call_id``: returns the id of the call of an index, where the model writes none."""
        self.parts: list[Part] = []
        self.num_calls = 0
        self._plan = plan
        self._parser = None if plan is None else plan.parser()
        self._call_id = call_id
        self._is_open = False

    def feed(self, text: str, end: FinishReason | None) -> list[Event]:
        """Take more text; ``end`` says why the answer ends with it."""
        events: list[Event] = []
        for delta in self._deltas(text, end):
            self._add(events, delta)
        if end is not None:
            self._close(events)
        return events

    def text(self, kind: Kind) -> str:
        """Return the text of all parts of one kind."""
        return "".join([part.text for part in self.parts if part.kind is kind])

    def _deltas(self, text: str, end: FinishReason | None) -> list[Delta]:
        if self._parser is None:
            return [ContentDelta(text)]
        deltas = self._parser.feed(text) if text else []
        if end is None:
            return deltas
        cut = end is not FinishReason.STOP
        rest = self._parser.finish(cut=cut)
        if self._parser.was_unmarked and self._plan is not None:
            self._plan.notes["unmarked_calls"] = True
        if cut and self._plan is not None and self._plan.required:  # the piece of a call that was cut
            rest = [delta for delta in rest if not isinstance(delta, ContentDelta)]
        return deltas + rest

    def _add(self, events: list[Event], delta: Delta) -> None:
        plan = self._plan
        if isinstance(delta, CallDelta):
            assert plan is not None
            if plan.max_calls is not None and delta.call >= plan.max_calls:
                return
            if delta.name is not None:
                self._open(events, Kind.CALL, delta.name, delta.id or self._call_id(self.num_calls))
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


_FLOOR = -9999.0  # JSON has no -Infinity; OpenAI's servers use this number


@dataclass(frozen=True, slots=True)
class TokenNames:
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
    return max(logprob, _FLOOR)


class Choices(Protocol):
    """The choices of one endpoint."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def opening(self, index: int, echo: str) -> bytes | None:
        """Return the choice object before any content, or None."""

    def delta(self, index: int, chunk: OutputChunk) -> bytes | None:
        """Return the choice object of one chunk; None if there is nothing to show yet."""

    def whole(self, index: int, chunk: OutputChunk, prompt_token_ids: Sequence[int]) -> dict[str, Any]:
        """Return the choice object of a whole answer, given as one chunk."""
        raise NotImplementedError

    def beside(self, prompt_token_ids: Sequence[int]) -> dict[str, Any]:
        """Return fields beside ``choices``, in a whole answer and in the first chunk."""
        return {}

    def scored(self, index: int, chunk: OutputChunk) -> dict[str, Any]:
        """Return fields beside ``choices`` that a chunk brings: the prompt's log-probabilities."""
        return {}


class ChoicesAnswer(Answer):
    """``options`` None: not streamed."""

    def __init__(self, head: Head, choices: Choices, options: StreamOptions | None, n: int) -> None:
        self.head = head
        self.streamed = options is not None
        self._choices = choices
        self._options = options or StreamOptions()
        self._n = n
        self._envelope = Envelope(head, choices.chunk_kind, usage_field=self._options.include_usage)

    def whole(self, chunks: Sequence[OutputChunk], prompts: Sequence[Sequence[int]], usage: Usage) -> bytes:
        choices = self._choices
        items = [choices.whole(i, chunk, prompts[i // self._n]) for i, chunk in enumerate(chunks)]
        values = {
            **self.head.to_json(choices.kind),
            "choices": items,
            "usage": usage.to_json(),
            **usage.beside(),
        }
        return _encode({**values, **choices.beside(prompts[0]), **choices.scored(0, chunks[0])})

    def opening(self, prompts: Sequence[Sequence[int]], echoes: Sequence[str], usage: Usage) -> bytes:
        beside = self._choices.beside(prompts[0])
        frames = []
        for index in range(len(prompts) * self._n):
            opening = self._choices.opening(index, echoes[index // self._n] if echoes else "")
            if opening is not None:
                frames.append(self._envelope.frame(opening, beside))
        return b"".join(frames)

    def frame(self, index: int, chunk: OutputChunk, usage: Usage) -> bytes:
        choice = self._choices.delta(index, chunk)
        beside = self._choices.scored(index, chunk) if chunk.prompt_logprobs is not None else {}
        if choice is None and not beside:
            return b""
        if self._options.continuous_usage_stats:
            beside["usage"] = usage.to_json()
        return self._envelope.frame(choice or b"", beside)

    def closing(self, usage: Usage) -> bytes:
        beside = usage.beside()
        if self._options.include_usage:
            beside["usage"] = usage.to_json()
        return self._envelope.frame(b"", beside) + STREAM_DONE if beside else STREAM_DONE

    def error(self, refusal: Refusal) -> bytes:
        return b"data: " + refusal.body() + b"\n\n" + STREAM_DONE


class Envelope:
    """Frames choices as server-sent events: ``data: {head…, "choices": […], "usage": …}``."""

    __slots__ = ("_end", "_start", "_usage_field")

    def __init__(self, head: Head, kind: str, *, usage_field: bool) -> None:
        self._start = b"data: " + _encode(head.to_json(kind))[:-1] + b',"choices":['
        self._usage_field = usage_field
        # With include_usage OpenAI writes "usage": null on every chunk but the last.
        self._end = b'],"usage":null}\n\n' if usage_field else b"]}\n\n"

    def frame(self, choice: bytes, beside: dict[str, Any]) -> bytes:
        """Frame a choice (or none) with the fields ``beside`` it, such as ``usage``."""
        if not beside:
            return self._start + choice + self._end
        if self._usage_field and "usage" not in beside:
            beside = {**beside, "usage": None}
        return self._start + choice + b"]," + _encode(beside)[1:] + b"\n\n"
