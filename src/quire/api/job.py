"""`Job`: a checked request and how its answer is written, whole or as chunks.

A chunk's bytes are put together from parts encoded once per stream; pydantic is not involved, and a plain text delta
costs one string encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import msgspec

from quire.api.params import deadline_of
from quire.api.protocol import RequestFields, SampledFields, StreamOptions
from quire.api.state import ApiState
from quire.engine.output import OutputChunk
from quire.http.body import STREAM_DONE
from quire.http.refusals import Refusal
from quire.request import Deadline, Pooling, SamplingParams

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    timing: Any = None  # set at the end if it was asked for
    truncated_tokens: int = 0  # cut off by truncate_prompt_tokens; not in prompt_tokens

    def beside(self) -> dict[str, Any]:
        """Return the fields that stand beside ``usage`` in an answer."""
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
    """The fields that every answer and every chunk of it repeats."""

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


def new_head(state: ApiState, prefix: str, model: str | None) -> Head:
    """Return the head of an answer under a new id. ``model``: the name that the request gives.

    Raises:
        NotFoundError: the model is not served.
    """
    info = state.frontend.info
    return Head(
        id=prefix + state.new_id(),
        created=int(state.unix_time()),
        model=state.check_model(model),
        fingerprint=state.settings.system_fingerprint,
        determinism=info.determinism if info is not None else state.model.determinism,
    )


class Answer:
    """How the chunks of a request are written: as one body, or as server-sent events if ``streamed``."""

    head: Head
    streamed = False

    def whole(self, chunks: Sequence[OutputChunk], prompts: Sequence[Sequence[int]], usage: Usage) -> bytes:
        """Return the body of an answer that is not streamed: one chunk per choice, the token ids of each prompt."""
        raise NotImplementedError

    def opening(self, prompts: Sequence[Sequence[int]], echoes: Sequence[str], usage: Usage) -> bytes:
        """Return the events before any chunk. ``echoes``: the text of each prompt if it is echoed, else empty."""
        raise NotImplementedError

    def frame(self, index: int, chunk: OutputChunk, usage: Usage) -> bytes:
        """Return the events of one chunk of one choice; empty if there is nothing to show yet."""
        raise NotImplementedError

    def closing(self, usage: Usage) -> bytes:
        """Return the events after the last chunk."""
        raise NotImplementedError

    def error(self, refusal: Refusal) -> bytes:
        """Return the events that end a stream which had begun and failed."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request: what to run and how to answer."""

    prompts: Sequence[str | Sequence[int]]
    sampling: SamplingParams
    answer: Answer
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    continues: bool = False  # the output continues the prompt's text
    client_request_id: str | None = None  # the body's request_id or rid
    prompt_text: str | None = None  # of a chat: the text that its template made
    # Keep this many tokens at the end of each prompt; -1: as many as the context holds.
    truncate_to: int | None = None
    deadline: Deadline | None = None
    timing: bool = False  # the answer has a timing block
    in_background: bool = False  # a response that runs without its client
    echo: bool = False  # each choice begins with its prompt's text
    pooling: Pooling | None = None  # of requests that sample nothing
    prompt_param: str = "prompt"  # the endpoint's name of its prompts

    @property
    def samples_nothing(self) -> bool:
        """Whether only the prompts are computed."""
        return self.pooling is not None or self.sampling.max_tokens == 0


def common_fields(request: RequestFields, ignored: list[str] | None) -> dict[str, Any]:
    """Return the fields of a `Job` that every endpoint takes from its request.

    Raises:
        RequestError: a deadline that is wrong.
    """
    given: dict[str, Any] = {
        "priority": request.priority,
        "cache_salt": request.cache_salt,
        "client_request_id": request.request_id or getattr(request, "rid", None),
        "tenant": getattr(request, "user", ""),
        "truncate_to": getattr(request, "truncate_prompt_tokens", None),
    }
    if isinstance(request, SampledFields):
        given |= {"deadline": deadline_of(request.deadline_ms, ignored), "timing": request.timing}
    return given


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

    def beside(self, prompt_token_ids: Sequence[int]) -> dict[str, Any]:
        """Return fields beside ``choices``, in a whole answer and in the first chunk."""

    def scored(self, index: int, chunk: OutputChunk) -> dict[str, Any]:
        """Return fields beside ``choices`` that a chunk brings: the prompt's log-probabilities."""


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


class WholeAnswer(Answer):
    """An answer that is never streamed: the head, the fields that ``write(chunks, usage)`` returns, and the usage."""

    def __init__(self, head: Head, write: Callable[[Sequence[OutputChunk], Usage], dict[str, Any]]) -> None:
        self.head = head
        self._write = write

    def whole(self, chunks: Sequence[OutputChunk], prompts: Sequence[Sequence[int]], usage: Usage) -> bytes:
        written = self._write(chunks, usage)
        counts = usage.to_json()
        del counts["completion_tokens"]
        return _encode({**self.head.to_json("list"), **written, "usage": counts})


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
