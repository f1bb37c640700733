"""`Job`: a checked request and how its answer is written."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from quire.api.fields import (
    REST_OF_CONTEXT,
    GenerationFields,
    RequestFields,
    SampledFields,
    StreamOptions,
    read_deadline,
    read_logit_bias,
)
from quire.api.state import ApiState
from quire.engine.output import OutputChunk
from quire.errors import NotFoundError, RequestError, clip
from quire.http.call import Call
from quire.http.refusals import LATEST, Refusal
from quire.http.wire import parse
from quire.request import NO_TERMS, Pooling, SamplingParams, Terms
from quire.structured_outputs import StructuredOutputsParams

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    timing: Any = None  # set at the end if it was asked for
    notes: dict[str, Any] = field(default_factory=dict)  # see `Job.notes`
    truncated_tokens: int = 0  # cut off by truncate_prompt_tokens; not in prompt_tokens

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tokens of the prompt, those of it from the cache, and of the output."""
        return self.prompt_tokens, self.cached_tokens, self.completion_tokens

    def beside(self) -> dict[str, Any]:
        """Return the fields that stand beside ``usage`` in an answer."""
        if isinstance(self.timing, dict):
            return {"timing": {**self.timing, **self.notes}}
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
    determinism: str  # see `EngineConfig`

    def id_of(self, *place: str | int) -> str:
        """Return the id of a part of the answer, 32 hexadecimal digits: the same on every replica that writes it."""
        return hashlib.blake2b(repr((self.id, *place)).encode(), digest_size=16).hexdigest()

    def to_json(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "determinism": self.determinism,
        }


def served_name(state: ApiState, name: str | None) -> str:
    """Return the name that the answer carries: the given one of the model or an adapter, or the model's first.

    Raises:
        NotFoundError: ``name`` is not served; lists the names that are.
    """
    names = state.model.names
    if name is None:
        return names[0]
    if name.endswith(LATEST) and name not in names:
        name = name.removesuffix(LATEST)
    if name not in names and name not in state.adapter_names:
        if any(fnmatchcase(name, pattern) for pattern in state.settings.stand_ins):
            return names[0]
        served = ", ".join(repr(n) for n in names)
        loaded = ", ".join(repr(n) for n in state.adapter_names)
        text = f"The model {clip(name)} is not served here. Served: {served}."
        raise NotFoundError(
            text + (f" Adapters: {loaded}." if loaded else ""), param="model", code="model_not_found"
        )
    return name


def new_head(state: ApiState, call: Call, prefix: str, model: str | None) -> Head:
    """Return the head of an answer under a new id, or the one it has. ``model``: the name that the request gives.

    Raises:
        NotFoundError: the model is not served.
    """
    info, named = state.frontend.info, call.answer
    return Head(
        id=prefix + (state.new_id() if named is None else named.id),
        created=int(state.unix_time()) if named is None else named.created,
        model=served_name(state, model),
        fingerprint=state.settings.system_fingerprint,
        determinism=info.determinism if info is not None else state.model.determinism,
    )


class Answer:
    """How the chunks of a request are written: as one body, or if ``streamed`` as events."""

    head: Head
    streamed = False
    media_type = b"text/event-stream; charset=utf-8"  # content type of a stream

    def body(self, chunks: Sequence[OutputChunk], prompts: Sequence[Sequence[int]], usage: Usage) -> bytes:
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
    terms: Terms = NO_TERMS
    owner: str = ""  # the tenant alone: it may read the answer
    continues: bool = False  # the output continues the prompt's text
    client_request_id: str | None = None  # the body's request_id or rid
    prompt_text: str | None = None  # a chat's text, made by its template
    messages: Sequence[Mapping[str, Any]] = ()  # those of a chat
    truncate_to: int | None = None  # last tokens of each prompt that are kept; -1: as many as fit
    timing: bool = False  # the answer has a timing block
    in_background: bool = False  # a response that runs without its client
    echo: bool = False  # each choice begins with its prompt's text
    pooling: Pooling | None = None  # for requests that sample nothing
    poolings: Sequence[Pooling] = ()  # in its place: one per prompt
    prompt_param: str = "prompt"  # the endpoint's name of its prompts
    # What reading the answer adds to ``timing``.
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def samples_nothing(self) -> bool:
        """Whether only the prompts are computed."""
        return self.pooling is not None or self.sampling.max_tokens == 0


def common_fields(request: RequestFields, call: Call, ignored: list[str] | None) -> dict[str, Any]:
    """Return the fields of a `Job` that every endpoint takes from its request.

    Raises:
        RequestError: a deadline that is wrong.
    """
    limit = getattr(request, "deadline_ms", None)
    return {
        "terms": call.terms(
            user=getattr(request, "user", ""),
            priority=request.priority,
            salt=request.cache_salt,
            deadline=None if limit is None else read_deadline(limit, ignored),
        ),
        "owner": call.tenant,
        "client_request_id": request.request_id or getattr(request, "rid", None),
        "truncate_to": getattr(request, "truncate_prompt_tokens", None),
        "timing": getattr(request, "timing", False),
    }


def stream_options(request: GenerationFields, ignored: list[str] | None = None) -> StreamOptions | None:
    """Return the checked ``stream_options``, or None when the answer is not streamed."""
    if request.stream_options is None:
        return StreamOptions() if request.stream else None
    if not request.stream and not any(request.stream_options.values()):  # nothing is asked for
        return None
    if not request.stream:
        raise RequestError(
            "stream_options is only allowed with stream = true.", param="stream_options", code="invalid_value"
        )
    return parse(StreamOptions, request.stream_options, prefix="stream_options.", ignored=ignored)


# Fields of `SamplingParams` that a request has too, with the same meaning.
_OTHER_MEANING = {"logit_bias", "logprobs", "max_tokens", "structured_outputs"}


_SAME_NAME = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name in GenerationFields.model_fields and field.name not in _OTHER_MEANING
)


def given_sampling(request: SampledFields) -> dict[str, Any]:
    """Return the sampling fields that a request sets.

    Raises:
        RequestError: best_of in a stream, or a logit_bias whose keys are not token ids.
    """
    params: dict[str, Any] = {}
    for name in _SAME_NAME:
        if (value := getattr(request, name, None)) is not None:
            params[name] = value
    if isinstance(params.get("stop"), str | list):  # an empty string stops nothing
        stop = params["stop"]
        params["stop"] = [text for text in ([stop] if isinstance(stop, str) else stop) if text]
    best_of = params.get("best_of")
    if (
        best_of is not None
        and not params.get("use_beam_search")
        and request.stream
        and best_of > (params.get("n") or 1)
    ):
        raise RequestError(
            f"best_of = {clip(best_of)} is not allowed with stream = true: the best "
            "answers are known at the end.",
            param="best_of",
        )
    if isinstance(request, GenerationFields) and request.logit_bias is not None:
        params["logit_bias"] = read_logit_bias(request.logit_bias)
    return params


def sampling_params(
    params: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    form: StructuredOutputsParams | None = None,
    client_names: Mapping[str, str] | None = None,
) -> SamplingParams:
    """Return `SamplingParams` of ``params``, else of the model's ``defaults``, else of their own defaults.

    ``max_tokens`` None means the rest of the context. ``client_names``: the client's name of fields that have another.

    Raises:
        RequestError: a value out of range, under the client's name.
    """
    if params.get("use_beam_search"):
        # Beams are not sampled, so defaults for sampling would contradict them.
        defaults = {}
    for name, value in defaults.items():
        if name in _SAME_NAME:
            params = {name: value, **params}
    try:
        return SamplingParams(**params, max_tokens=max_tokens, logprobs=logprobs, structured_outputs=form)
    except RequestError as error:
        client_name = (client_names or {}).get(error.param or "")
        if client_name is None:
            raise
        message = str(error).replace(str(error.param), client_name, 1)
        raise RequestError(message, param=client_name, code=error.code) from None


def output_limit(max_tokens: int | None) -> int | None:
    """Return ``max_tokens`` with None for the rest of the context."""
    return None if max_tokens == REST_OF_CONTEXT else max_tokens
