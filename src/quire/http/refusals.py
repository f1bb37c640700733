"""From exceptions to answers in OpenAI's error form: ``{"error": {"message", "type", "param", "code"}}``.

Anthropic's endpoints answer in its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from quire.errors import (
    CapacityError,
    EngineDeadError,
    NotFoundError,
    QuireError,
    RequestError,
)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    503: "service_unavailable_error",
}
ANTHROPIC_ROOT = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that is an error."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def error(self) -> dict[str, str | None]:
        """The value of ``error``, for a body and for an event in a stream that had begun."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code}

    def body(self, path: str = "") -> bytes:
        """The answer's body; below Anthropic's path in its form, ``{"type": "error", "error": {type, message}}``."""
        if path == ANTHROPIC_ROOT or path.startswith(ANTHROPIC_ROOT + "/"):
            kind = _ANTHROPIC_TYPES.get(
                self.status, "invalid_request_error" if self.status < 500 else "api_error"
            )
            return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": self.message}})
        return msgspec.json.encode({"error": self.error()})


class HttpError(QuireError):
    """A refusal that HTTP itself asks for: 401, 405, 413, 415, 503 while draining."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def refusal_of(error: Exception, *, retry_after_s: int = 1) -> Refusal:
    """Return the answer for ``error``; what Quire does not raise on purpose is a 500 without details."""
    match error:
        case HttpError():
            return error.refusal
        case NotFoundError():
            return Refusal(404, str(error), error.param, error.code)
        case RequestError():
            return Refusal(400, str(error), error.param, error.code)
        case CapacityError() if error.retryable:
            return busy(str(error), "unavailable", retry_after_s)  # loading or draining
        case CapacityError():
            return Refusal(400, str(error), error.param, "context_length_exceeded")
        case EngineDeadError():
            return Refusal(503, str(error), code="engine_dead")
        case QuireError():
            return Refusal(500, str(error), code="engine_error")
    return Refusal(
        500, "Internal error; the server's log has the details, under this request's id.", code="internal"
    )


def busy(message: str, code: str, retry_after_s: int) -> Refusal:
    """503 that tells the client when to come again."""
    return Refusal(503, message, code=code, headers=((b"retry-after", str(retry_after_s).encode()),))


def refusal_of_chunk(error: str | None, kind: str | None, *, retry_after_s: int = 1) -> Refusal:
    """Return the answer for a stream that ended with an error event of the engine (`TokenEvent.error_kind`)."""
    message = error or "The engine failed this request."
    if kind == "capacity":
        return busy(message, "queue_full", retry_after_s)
    if kind == "hopeless":
        return busy(message, "deadline_hopeless", retry_after_s)
    if kind == "deadline":
        return Refusal(504, message, code="deadline_exceeded")
    if kind == "never_fits":
        return Refusal(400, message, code="context_length_exceeded")
    if kind == "request":
        return Refusal(400, message, code="invalid_value")
    if kind == "dead":
        return Refusal(503, message, code="engine_dead")
    return Refusal(500, message, code="engine_error" if kind == "step" else "internal")
