"""Exceptions as answers in OpenAI's error form, ``{"error": {"message", "type", "param", "code"}}``, or in that of
Anthropic, Ollama or Text Embeddings Inference."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from quire.errors import CapacityError, EngineDeadError, NotFoundError, QuireError, RequestError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
ANTHROPIC_ROOT = "/v1/messages"
OLLAMA_ROOT = "/api/"
TEI_PATHS = ("/", "/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity")
LATEST = ":latest"  # Ollama's tag of a name without one
PLACEHOLDERS = ("tgi", "dummy")  # sent by huggingface_hub for whatever model is at an address
# Ollama's clients ask for a least version before they use tools, thinking or logprobs. It is that of the API here.
OLLAMA_VERSION = "0.12.11"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

# `TokenEvent.error_kind` → status and code.
_CHUNK_ERRORS = {
    "capacity": (503, "queue_full"),
    "hopeless": (503, "deadline_hopeless"),
    "deadline": (504, "deadline_exceeded"),
    "never_fits": (400, "context_length_exceeded"),
    "request": (400, "invalid_value"),
    "dead": (503, "engine_dead"),
    "slow_reader": (408, "slow_reader"),
    "step": (500, "engine_error"),
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that is an error."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()
    details: tuple[tuple[str, str], ...] = ()  # machine-readable, in Anthropic's form only

    def error(self) -> dict[str, str | None]:
        """Return the value of ``error``."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code}

    @property
    def _tei_type(self) -> str:
        if self.status in (429, 503):
            return "Overloaded"
        return "Validation" if self.status < 500 else "Backend"

    def body(self, path: str = "") -> bytes:
        """Return the answer's body.

        Under Anthropic's path it is ``{"type": "error", "error": {type, message}}``, under Ollama's
        ``{"error": message}``, under those of Text Embeddings Inference ``{"error": message, "error_type", "param"}``.
        """
        if path in TEI_PATHS:
            return msgspec.json.encode(
                {"error": self.message, "error_type": self._tei_type, "param": self.param}
            )
        if path.startswith(OLLAMA_ROOT):
            return msgspec.json.encode({"error": self.message})
        if path == ANTHROPIC_ROOT or path.startswith(ANTHROPIC_ROOT + "/"):
            kind = _ANTHROPIC_TYPES.get(
                self.status, "invalid_request_error" if self.status < 500 else "api_error"
            )
            error: dict[str, object] = {"type": kind, "message": self.message}
            if self.details:
                error["details"] = dict(self.details)
            return msgspec.json.encode({"type": "error", "error": error})
        return msgspec.json.encode({"error": self.error()})


class HttpError(QuireError):
    """An error that is an answer already, such as 413, 415, or 503 while draining."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def as_refusal(error: Exception, *, retry_after_s: int = 1) -> Refusal:
    """Return the answer for ``error``; an unexpected exception is a 500 without details."""
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
    """Return a 503 that tells the client when to retry."""
    return Refusal(503, message, code=code, headers=((b"retry-after", str(retry_after_s).encode()),))


def refusal_of_chunk(error: str | None, kind: str | None, *, retry_after_s: int = 1) -> Refusal:
    """Return the answer for a stream that ended with an error event of the engine (`TokenEvent.error_kind`)."""
    message = error or "The engine failed this request."
    status, code = _CHUNK_ERRORS.get(kind or "", (500, "internal"))
    if code in ("queue_full", "deadline_hopeless"):
        return busy(message, code, retry_after_s)
    return Refusal(status, message, code=code)
