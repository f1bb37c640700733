"""`Job`: a checked request and how its answer is written."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.api.protocol import RequestFields, deadline_of
from quire.api.state import ApiState
from quire.engine.output import OutputChunk
from quire.engine.prompts import RequestOptions
from quire.http.call import Call
from quire.http.refusals import Refusal
from quire.request import Pooling, SamplingParams, Tenant

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    timing: Any = None  # set at the end if it was asked for
    notes: dict[str, Any] = field(default_factory=dict)  # of `Job`
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
    determinism: str  # of `EngineConfig`

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


def new_head(state: ApiState, call: Call, prefix: str, model: str | None) -> Head:
    """Return the head of an answer under a new id, or the one it has. ``model``: the name that the request gives.

    Raises:
        NotFoundError: the model is not served.
    """
    info, named = state.frontend.info, call.answer
    return Head(
        id=prefix + (state.new_id() if named is None else named.id),
        created=int(state.unix_time()) if named is None else named.created,
        model=state.check_model(model),
        fingerprint=state.settings.system_fingerprint,
        determinism=info.determinism if info is not None else state.model.determinism,
    )


class Answer:
    """How the chunks of a request are written: as one body, or if ``streamed`` as events."""

    head: Head
    streamed = False
    media_type = b"text/event-stream; charset=utf-8"  # of a stream

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
    # What the edge says of it and the core reads, passed on as it is. The tenant is, without one, the client's user.
    options: RequestOptions = field(default_factory=RequestOptions)
    owner: str = ""  # the tenant alone: it may read the answer
    continues: bool = False  # the output continues the prompt's text
    client_request_id: str | None = None  # the body's request_id or rid
    prompt_text: str | None = None  # of a chat: the text that its template made
    truncate_to: int | None = None  # last tokens of each prompt that are kept; -1: as many as fit
    timing: bool = False  # the answer has a timing block
    in_background: bool = False  # a response that runs without its client
    echo: bool = False  # each choice begins with its prompt's text
    pooling: Pooling | None = None  # of requests that sample nothing
    prompt_param: str = "prompt"  # the endpoint's name of its prompts
    notes: dict[str, Any] = field(default_factory=dict)  # that its reading adds to ``timing``

    @property
    def samples_nothing(self) -> bool:
        """Whether only the prompts are computed."""
        return self.pooling is not None or self.sampling.max_tokens == 0


def common_fields(request: RequestFields, call: Call, ignored: list[str] | None) -> dict[str, Any]:
    """Return the fields of a `Job` that every endpoint takes from its request.

    Raises:
        RequestError: a deadline that is wrong.
    """
    salt = request.cache_salt
    options: RequestOptions = {
        "priority": request.priority if call.priority is None else call.priority,
        "cache_salt": cache_salt(call.salt_group, salt) if salt or call.tenant or call.cache_group else "",
        "tenant": Tenant(call.tenant or getattr(request, "user", ""), call.weight),
    }
    limit = getattr(request, "deadline_ms", None)
    if limit is not None:
        options["deadline"] = deadline_of(limit, ignored)
    return {
        "options": options,
        "owner": call.tenant,
        "client_request_id": request.request_id or getattr(request, "rid", None),
        "truncate_to": getattr(request, "truncate_prompt_tokens", None),
        "timing": getattr(request, "timing", False),
    }


def cache_salt(group: str, given: str) -> str:
    """Return the salt of a request whose tenant shares cached blocks within ``group``; "": it has no tenant.

    Tenants share no cached blocks: the time to a first token would tell what another one has asked. No client can
    choose a salt that ends up as that of another group: a group's begins with its name and a line's end, and a salt
    without a group that has one is moved behind an empty name.
    """
    return f"{group}\n{given}" if group or "\n" in given else given
