"""Which answer an error becomes, and the form that each API's clients read it in."""

from __future__ import annotations

import json

import pytest

from quire.errors import CapacityError, EngineDeadError, NotFoundError, QuireError, RequestError
from quire.http.refusals import HttpError, Refusal, as_refusal, busy, refusal_of_chunk


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (HttpError(Refusal(413, "too large", code="body_too_large")), 413, "body_too_large"),
        (NotFoundError("no such model", param="model", code="model_not_found"), 404, "model_not_found"),
        (RequestError("n is wrong", param="n", code="invalid_value"), 400, "invalid_value"),
        (CapacityError("loading", retryable=True), 503, "unavailable"),
        (CapacityError("too long", retryable=False), 400, "context_length_exceeded"),
        (EngineDeadError("dead"), 503, "engine_dead"),
        (QuireError("failed"), 500, "engine_error"),
    ],
)
def test_an_error_has_its_status_and_code(error: Exception, status: int, code: str) -> None:
    refusal = as_refusal(error, retry_after_s=7)
    assert (refusal.status, refusal.code) == (status, code)
    assert dict(refusal.headers) == ({b"retry-after": b"7"} if code == "unavailable" else {})


def test_an_unexpected_error_tells_no_details() -> None:
    refusal = as_refusal(KeyError("/home/someone/secret"))
    assert (refusal.status, refusal.code) == (500, "internal")
    assert "secret" not in refusal.body().decode()


@pytest.mark.parametrize(
    ("kind", "status", "retries"),
    [
        ("capacity", 503, True),
        ("hopeless", 503, True),
        ("deadline", 504, False),
        ("never_fits", 400, False),
        ("request", 400, False),
        ("dead", 503, False),
        ("slow_reader", 408, False),
        ("step", 500, False),
        ("of a later version", 500, False),
        (None, 500, False),
    ],
)
def test_an_error_event_of_the_engine_is_an_answer(kind: str | None, status: int, retries: bool) -> None:
    refusal = refusal_of_chunk("why", kind, retry_after_s=3)
    assert (refusal.status, refusal.message) == (status, "why")
    assert (dict(refusal.headers) == {b"retry-after": b"3"}) is retries


def test_each_api_has_its_own_form_of_an_error() -> None:
    refusal = busy("full", "queue_full", 2)
    openai = {"message": "full", "type": "service_unavailable_error", "param": None, "code": "queue_full"}
    anthropic = {"type": "error", "error": {"type": "overloaded_error", "message": "full"}}
    for path, body in (
        ("/v1/chat/completions", {"error": openai}),
        ("/v1/messages", anthropic),
        ("/v1/messages/count_tokens", anthropic),
        ("/v1/messagesX", {"error": openai}),
        ("/api/chat", {"error": "full"}),
    ):
        assert json.loads(refusal.body(path)) == body, path
