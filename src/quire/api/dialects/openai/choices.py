"""Answers: the text of one answer as parts — reasoning, text, calls — and the choices of OpenAI's completions.

Every conversation's answer is taken apart by `Assembler`; each endpoint only renders the events that it yields.
Log-probabilities, in OpenAI's two formats, and `ChoicesAnswer` are below: a chunk's bytes are put together from parts
encoded once per stream; pydantic is not involved, and a plain text delta costs one string encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import msgspec

from quire.api.assembler import Assembler, Event, Kind, Part
from quire.api.fields import StreamOptions
from quire.api.job import Answer, Head, Usage
from quire.api.output_plan import OutputPlan
from quire.api.token_logprobs import TokenNames, chat_logprobs, prompt_logprobs
from quire.engine.output import OutputChunk
from quire.http.events import STREAM_DONE
from quire.http.refusals import Refusal
from quire.request import FinishReason, TokenLogprobs

_encode = msgspec.json.Encoder().encode


class Choices(Protocol):
    """The choices of one endpoint."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def opening(self, index: int, echo: str) -> bytes | None:
        """Return the choice object before any content, or None."""

    def delta(self, index: int, chunk: OutputChunk) -> bytes | None:
        """Return the choice object of one chunk; None if there is nothing to show yet."""

    def full_choice(self, index: int, chunk: OutputChunk, prompt_token_ids: Sequence[int]) -> dict[str, Any]:
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

    def body(self, chunks: Sequence[OutputChunk], prompts: Sequence[Sequence[int]], usage: Usage) -> bytes:
        choices = self._choices
        items = [choices.full_choice(i, chunk, prompts[i // self._n]) for i, chunk in enumerate(chunks)]
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


@dataclass(slots=True)
class ChatChoices(Choices):
    """The choices of one answer. ``plan`` None: the model's text is the content as it is."""

    kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"

    names: TokenNames
    with_logprobs: bool
    with_ids: bool
    num_prompt_logprobs: int | None
    plan: OutputPlan | None
    head: Head
    _assemblers: dict[int, Assembler] = field(default_factory=dict)  # choice → assembler

    def opening(self, index: int, echo: str) -> bytes | None:
        """Return the choice that names the role, before any content; chats are not echoed."""
        return (
            b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            % index
        )

    def delta(self, index: int, chunk: OutputChunk) -> bytes | None:
        """Return the choice object of one chunk; None if there is nothing to show yet."""
        last = chunk.finish_reason is not None
        text_only = not self.with_logprobs and not self.with_ids
        if text_only and self.plan is None:
            if not last and not chunk.text:
                return None
            content = b'{"content":%b}' % _encode(chunk.text) if chunk.text else b"{}"
            if not last:
                return b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}' % (index, content)
            reasons = _encode(chunk.finish_reason), _encode(chunk.stop_reason)
            form = b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":%b,"stop_reason":%b}'
            return form % (index, content, *reasons)
        delta = _delta(self._assembler(index).feed(chunk.text, chunk.finish_reason))
        if text_only and not last and not delta:
            return None
        if not delta and self.plan is None and not last:
            delta = {"content": ""}  # a token whose text is held back
        value: dict[str, Any] = {"index": index, "delta": delta, **self._beside_text(index, chunk)}
        if not last:
            del value["stop_reason"]
        return _encode(value)

    def full_choice(self, index: int, chunk: OutputChunk, prompt_token_ids: Sequence[int]) -> dict[str, Any]:
        """Return the choice object of a whole answer, given as one chunk."""
        assembler = self._assembler(index)
        assembler.feed(chunk.text, chunk.finish_reason)
        calls = [_call(part, part.text) for part in assembler.parts if part.kind is Kind.CALL]
        content = assembler.text(Kind.TEXT)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
        }
        message |= _reasoning(assembler.text(Kind.REASONING))
        if calls:
            message["tool_calls"] = calls
        return {"index": index, "message": message, **self._beside_text(index, chunk)}

    def beside(self, prompt_token_ids: Sequence[int]) -> dict[str, Any]:
        """Return fields beside ``choices``, in a whole answer and in the first chunk."""
        return {"prompt_token_ids": prompt_token_ids} if self.with_ids else {}

    def scored(self, index: int, chunk: OutputChunk) -> dict[str, Any]:
        """Return the prompt's log-probabilities with the first chunk of the first choice."""
        return {} if index else prompt_logprobs(chunk, self.num_prompt_logprobs, self.names)

    def _assembler(self, index: int) -> Assembler:
        assembler = self._assemblers.get(index)
        if assembler is None:
            assembler = Assembler(self.plan, lambda call: "call_" + self.head.id_of("call", index, call)[:24])
            self._assemblers[index] = assembler
        return assembler

    def _beside_text(self, index: int, chunk: OutputChunk) -> dict[str, Any]:
        """Return the fields of a choice beside its message or delta."""
        finish: str | None = chunk.finish_reason
        if chunk.finish_reason is FinishReason.STOP and self._assembler(index).num_calls:
            finish = "tool_calls"
        fields = {
            "logprobs": self._logprobs(chunk.logprobs),
            "finish_reason": finish,
            "stop_reason": chunk.stop_reason,
        }
        return {**fields, "token_ids": chunk.token_ids} if self.with_ids else fields

    def _logprobs(self, logprobs: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        return chat_logprobs(logprobs or (), self.names) if self.with_logprobs else None


def _delta(events: Sequence[Event]) -> dict[str, Any]:
    """Return the ``delta`` object of events; empty if they add nothing."""
    delta: dict[str, Any] = {}
    for verb, part, text in events:
        if part.kind is Kind.CALL and verb != "close":
            call: dict[str, Any] = {"index": part.call}
            call |= _call(part, "") if verb == "open" else {"function": {"arguments": text}}
            delta.setdefault("tool_calls", []).append(call)
        elif verb == "more":
            pieces = {"content": text} if part.kind is Kind.TEXT else _reasoning(text)
            delta |= {name: delta.get(name, "") + piece for name, piece in pieces.items()}
    return delta


def _reasoning(text: str) -> dict[str, str]:
    """vLLM's newer name, and the older one of DeepSeek, SGLang and earlier vLLM."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _call(part: Part, arguments: str) -> dict[str, Any]:
    return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": arguments}}
