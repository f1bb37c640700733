"""The JSON of answers, whole and as chunks; `chat_choices` has the choices of chats.

A chunk's bytes are put together from parts encoded once per stream; pydantic is not involved, and a plain text delta
costs one string encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from quire.api.chat_choices import ChatChoices
from quire.api.logprobs import CompletionLogprobs, TokenNames, prompt_logprobs
from quire.api.protocol import StreamOptions
from quire.api.state import ApiState
from quire.engine.output import OutputChunk
from quire.http.refusals import Refusal

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    timing: Any = None  # set at the end where it is asked for; stands beside the usage
    truncated_tokens: int = 0  # cut off by truncate_prompt_tokens; not in prompt_tokens

    def beside(self) -> dict[str, Any]:
        """What stands beside ``usage`` in an answer."""
        return {} if self.timing is None else {"timing": self.timing}

    def to_json(self) -> dict[str, Any]:
        details = {"cached_tokens": self.cached_tokens}
        if self.truncated_tokens:
            details["truncated_tokens"] = self.truncated_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": details,
        }


@dataclass(frozen=True, slots=True)
class Head:
    """What every answer and every chunk of it repeats."""

    id: str
    created: int  # seconds since 1970
    model: str
    fingerprint: str
    determinism: str  # "exact" | "batch-dependent"

    def to_json(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "determinism": self.determinism,
        }


def new_head(state: ApiState, prefix: str, model: str) -> Head:
    """Return the head of an answer, under an id that no other request has."""
    info = state.frontend.info
    return Head(
        id=prefix + state.new_id(),
        created=int(state.unix_time()),
        model=model,
        fingerprint=state.settings.system_fingerprint,
        determinism=info.determinism if info is not None else state.model.determinism,
    )


class Envelope:
    """Frames choices as server-sent events: ``data: {head…, "choices": […], "usage": …}``."""

    __slots__ = ("_end", "_start", "_usage_field")

    def __init__(self, head: Head, kind: str, *, usage_field: bool) -> None:
        self._start = b"data: " + _encode(head.to_json(kind))[:-1] + b',"choices":['
        self._usage_field = usage_field
        # With include_usage OpenAI writes "usage": null on every chunk but the last.
        self._end = b'],"usage":null}\n\n' if usage_field else b"]}\n\n"

    def frame(self, choice: bytes) -> bytes:
        return self._start + choice + self._end

    def frame_with(self, choice: bytes, extra: dict[str, Any]) -> bytes:
        """Frame a choice (or none) with more fields beside it, such as ``usage``."""
        if self._usage_field and "usage" not in extra:
            extra = {**extra, "usage": None}
        return self._start + choice + b"]," + _encode(extra)[1:] + b"\n\n"


@dataclass(slots=True)
class CompletionChoices:
    """Choices of ``/v1/completions``. ``num_logprobs``: alternatives beside each token, also of an echoed prompt."""

    kind: ClassVar = "text_completion"
    chunk_kind: ClassVar = "text_completion"
    id_prefix: ClassVar = "cmpl-"

    names: TokenNames
    num_logprobs: int | None
    with_ids: bool
    num_prompt_logprobs: int | None = None
    echo: bool = False
    _renderers: dict[int, CompletionLogprobs] = field(default_factory=dict)

    def opening(self, index: int, echo: str) -> bytes | None:
        """The chunk with the prompt's text, where it is asked for."""
        if not echo:
            return None
        return b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}' % (index, _encode(echo))

    def delta(self, index: int, chunk: OutputChunk) -> bytes | None:
        """The choice object of one chunk; None when there is nothing to say yet."""
        plain = chunk.finish_reason is None and chunk.prompt_logprobs is None
        if plain and self.num_logprobs is None and not self.with_ids:
            if not chunk.text:
                return None
            return b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}' % (
                index,
                _encode(chunk.text),
            )
        value: dict[str, Any] = {
            "index": index,
            "text": chunk.text,
            "logprobs": self._logprobs(index, chunk),
            "finish_reason": chunk.finish_reason,
            **self._scored(chunk),
        }
        if chunk.finish_reason is not None:
            value["stop_reason"] = chunk.stop_reason
        if self.with_ids:
            value["token_ids"] = chunk.token_ids
        return _encode(value)

    def whole(self, index: int, chunk: OutputChunk, prompt_token_ids: Sequence[int]) -> dict[str, Any]:
        """The choice object of a whole answer, given as one chunk."""
        value: dict[str, Any] = {
            "index": index,
            "text": chunk.text,
            "logprobs": self._logprobs(index, chunk),
            "finish_reason": chunk.finish_reason,
            "stop_reason": chunk.stop_reason,
            **self._scored(chunk),
        }
        if self.with_ids:
            value["token_ids"] = chunk.token_ids
            value["prompt_token_ids"] = prompt_token_ids
        return value

    def beside(self, prompt_token_ids: Sequence[int]) -> dict[str, Any]:
        """Fields beside ``choices``: none, since each choice may have another prompt."""
        return {}

    def scored(self, index: int, chunk: OutputChunk) -> dict[str, Any]:
        """More fields beside ``choices``: none; each choice has its prompt's log-probabilities."""
        return {}

    def _scored(self, chunk: OutputChunk) -> dict[str, Any]:
        if chunk.prompt_logprobs is None or self.num_prompt_logprobs is None:
            return {}
        entries = prompt_logprobs(chunk.prompt_logprobs, self.num_prompt_logprobs, self.names)
        return {"prompt_logprobs": entries}

    def _logprobs(self, index: int, chunk: OutputChunk) -> dict[str, Any] | None:
        if self.num_logprobs is None:
            return None
        renderer = self._renderers.get(index)
        if renderer is None:
            renderer = self._renderers[index] = CompletionLogprobs(self.names)
        echoed = None
        if self.echo and chunk.prompt_logprobs is not None:
            assert chunk.prompt_token_ids is not None
            echoed = renderer.echo(chunk.prompt_logprobs, chunk.prompt_token_ids, self.num_logprobs)
        return renderer.render(chunk.logprobs or (), echoed)


Choices = ChatChoices | CompletionChoices


class ChoicesAnswer:
    """The answer of OpenAI's completions and chat completions: a list of choices. ``options`` None: not streamed."""

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
                framed = (
                    self._envelope.frame_with(opening, beside) if beside else self._envelope.frame(opening)
                )
                frames.append(framed)
        return b"".join(frames)

    def frame(self, index: int, chunk: OutputChunk, usage: Usage) -> bytes:
        choice = self._choices.delta(index, chunk)
        beside = self._choices.scored(index, chunk) if chunk.prompt_logprobs is not None else {}
        if choice is None and not beside:
            return b""
        if self._options.continuous_usage_stats:
            beside["usage"] = usage.to_json()
        return (
            self._envelope.frame_with(choice or b"", beside)
            if beside
            else self._envelope.frame(choice or b"")
        )

    def closing(self, usage: Usage) -> bytes:
        if self._options.include_usage:
            return self._envelope.frame_with(b"", {"usage": usage.to_json(), **usage.beside()}) + DONE
        if usage.timing is not None:
            return self._envelope.frame_with(b"", usage.beside()) + DONE
        return DONE

    def error(self, refusal: Refusal) -> bytes:
        return b"data: " + refusal.body() + b"\n\n" + DONE


class WholeAnswer:
    """An `Answer` whose JSON is the head, what ``write(chunks, usage)`` makes of a chunk a prompt, and the usage."""

    streamed = False

    def __init__(self, head: Head, write: Callable[[Sequence[OutputChunk], Usage], dict[str, Any]]) -> None:
        self.head = head
        self._write = write

    def whole(self, chunks: Sequence[OutputChunk], prompts: Sequence[Sequence[int]], usage: Usage) -> bytes:
        written = self._write(chunks, usage)
        counts = usage.to_json()
        del counts["completion_tokens"]
        return _encode({**self.head.to_json("list"), **written, "usage": counts})

    def opening(self, prompts: Sequence[Sequence[int]], echoes: Sequence[str], usage: Usage) -> bytes:
        raise AssertionError("this answer is never streamed")

    def frame(self, index: int, chunk: OutputChunk, usage: Usage) -> bytes:
        raise AssertionError("this answer is never streamed")

    def closing(self, usage: Usage) -> bytes:
        raise AssertionError("this answer is never streamed")

    def error(self, refusal: Refusal) -> bytes:
        raise AssertionError("this answer is never streamed")
