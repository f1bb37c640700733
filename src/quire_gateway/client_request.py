"""`ClientRequest`: what the gateway reads of a request, of any dialect. Everything else passes through unread."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from starlette.types import Receive, Scope

from quire.errors import RequestError, clip
from quire.http.body import DecodeLarge, decode_body, header, read_bytes
from quire.http.call import call_of
from quire.http.refusals import LATEST, OLLAMA_ROOT
from quire.http.wire import not_allowed
from quire.text.digest import digested_text

DEFAULT_OUTPUT_TOKENS = 256  # counted for a request that names no limit
_STREAMS = ("/api/chat", "/api/generate")  # of Ollama's: unless the body says otherwise
_TGI_STREAM = "/generate_stream"
TGI_PATHS = ("/generate", _TGI_STREAM)  # whose path says whether the answer is a stream, not the body
_MAX_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_NO_LIMIT = -1  # llama.cpp's and Ollama's
# llama.cpp's, Ollama's and TGI's names of a limit; what is no positive number there is the backend's to refuse.
_OTHER_LIMITS = ("n_predict", "num_predict", "max_new_tokens")
_SESSION_HEADERS = (b"x-session-id", b"x-session-affinity")
_SESSION_FIELDS = ("session_id", "prompt_cache_key", "safety_identifier", "user")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request of a client."""

    path: str
    raw: bytes
    body: Mapping[str, Any]
    model: str | None
    streams: bool
    text: bytes  # of the prompt, as `gateway.digest` lays it out
    num_output_tokens: int  # at most, over all choices
    session: bytes
    priority: int | None = None  # replaces the body's: that of a batch, whose lines are sent by this process
    hint: str = ""  # of the backend that holds the stored response it names; see `gateway.ownership`
    salt: str | None = None  # replaces the client's ``cache_salt``

    @property
    def wants_usage(self) -> bool:
        """Whether a stream of this body ends with its usage: OpenAI's chats and completions have to ask for it."""
        if self.path not in ("/v1/chat/completions", "/v1/completions"):
            return True
        options = self.body.get("stream_options")
        return isinstance(options, dict) and options.get("include_usage") is True

    def changed_to(self, body: Mapping[str, Any]) -> ClientRequest:
        """Return the same request with another body, for the same model and answered in the same way."""
        num = _num_output_tokens(body)
        return replace(
            self, raw=msgspec.json.encode(body), body=body, text=digested_text(body), num_output_tokens=num
        )

    @property
    def plain_body(self) -> dict[str, Any]:
        """The body without arrays, which long lists of token ids are in a large one."""
        return {k: _plain(v) if k in ("prompt", "input") else v for k, v in self.body.items()}

    @property
    def deadline_s(self) -> float | None:
        """The smallest number in ``deadline_ms`` in seconds; what is no number is the backend's to refuse."""
        deadline = self.body.get("deadline_ms")
        values = deadline.values() if isinstance(deadline, dict) else (deadline,)
        numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        return min(numbers) / 1e3 if numbers else None

    def body_for(self, model: str, *, adds_usage: bool = False, takes_salt: bool | None = True) -> bytes:
        """Return the body with the name ``model``, and with usage at the end of its stream if ``adds_usage``.

        ``takes_salt``: ``salt`` goes along. Every other field keeps its bytes.
        """
        salt = self.salt if takes_salt else None
        is_named = model == self.model or (
            self.path.startswith(OLLAMA_ROOT) and f"{model}{LATEST}" == self.model
        )
        if is_named and not adds_usage and self.priority is None:
            if salt is None:
                return self.raw
            if self.body and "cache_salt" not in self.body:  # a large body is not read again
                return b'%b,"cache_salt":%b}' % (self.raw.rstrip()[:-1], msgspec.json.encode(salt))
        fields = _fields(self.raw)
        fields["model"] = msgspec.Raw(msgspec.json.encode(model))
        if self.priority is not None:
            fields["priority"] = msgspec.Raw(msgspec.json.encode(self.priority))
        if salt is not None:
            fields["cache_salt"] = msgspec.Raw(msgspec.json.encode(salt))
        if adds_usage:
            options = self.body.get("stream_options")
            options = (
                {**options, "include_usage": True} if isinstance(options, dict) else {"include_usage": True}
            )
            fields["stream_options"] = msgspec.Raw(msgspec.json.encode(options))
        return msgspec.json.encode(fields)


async def read_request(
    scope: Scope, receive: Receive, max_bytes: int, decode_large: DecodeLarge
) -> ClientRequest:
    """Read a request whose body is a JSON object. ``decode_large``: as of `decode_body`.

    Raises:
        HttpError: 413 beyond ``max_bytes``, 415 for another media type, 503 where no more bodies may be held.
        RequestError: not a JSON object, something in it is above its limit, or ``model``, ``stream`` or a limit of
            tokens has the wrong type.
        CapacityError: too many large bodies wait (retryable).
        Disconnected: the client left.
    """
    raw = await read_bytes(scope, receive, max_bytes, "max_body_mib")
    body = await decode_body([raw], decode_large)
    if not isinstance(body, dict):
        raise RequestError(f"The body {clip(body)} is not allowed: it must be an object.")
    model, stream = body.get("model"), body.get("stream")
    if model is not None and not isinstance(model, str):
        raise not_allowed("model", model, "a string", "invalid_type")
    if stream is not None and not isinstance(stream, bool):
        raise not_allowed("stream", stream, "true or false", "invalid_type")
    return ClientRequest(
        path=scope["path"],
        raw=raw,
        body=body,
        model=model,
        streams=_streams(scope["path"], stream),
        text=digested_text(body),
        num_output_tokens=_num_output_tokens(body),
        session=_session(scope, body),
        priority=call_of(scope).priority,
    )


def _streams(path: str, stream: bool | None) -> bool:
    if path in TGI_PATHS:
        return path == _TGI_STREAM
    return stream if stream is not None else path in _STREAMS


def _plain(value: Any) -> Any:
    if isinstance(value, array):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _num_output_tokens(body: Mapping[str, Any]) -> int:
    limit = DEFAULT_OUTPUT_TOKENS
    for name in _MAX_TOKENS:
        value = body.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < _NO_LIMIT:
                raise not_allowed(name, value, "an integer of 0 or more, or -1 for no limit", "invalid_type")
            limit = min(value, 1 << 31) if value != _NO_LIMIT else limit
            break
    for holder in (body, body.get("options"), body.get("parameters")):  # options: Ollama's; parameters: TGI's
        limits = holder if isinstance(holder, dict) else {}
        for name in _OTHER_LIMITS if holder is body else (*_OTHER_LIMITS, *_MAX_TOKENS):
            if type(num := limits.get(name)) is int and num > 0:
                limit = min(num, 1 << 31)
    num = body.get("n")
    return limit * (min(num, 1024) if isinstance(num, int) and num > 1 else 1)


def _session(scope: Scope, body: Mapping[str, Any]) -> bytes:
    for name in _SESSION_HEADERS:
        if value := header(scope, name):
            return value
    for field in _SESSION_FIELDS:
        if isinstance(value := body.get(field), str):
            return value.encode("utf-8", "surrogatepass")
    return b""
