"""Keys, CORS, request ids, probes, models and metrics."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.api.asgi_client import Api, error_of, events

from quire.http.call import Call
from quire.http.client import post_local
from quire.http.edge import Edge
from quire.metrics.log import configure

OPEN = ["/livez", "/readyz", "/startupz", "/health", "/version", "/metrics"]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_keys() -> None:
    api = Api(api_keys=("secret", "second"))
    for key in ("secret", "second"):
        assert api.call("GET", "/v1/models", headers=bearer(key)).status_code == 200
    wrong: list[dict[str, str]] = [
        {}, bearer("secre"), bearer("secrets"), bearer(""), {"authorization": "secret"},
        {"authorization": "Basic secret"}, {"authorization": "Bearer"},
    ]  # fmt: skip
    for headers in wrong:
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/nothing")):
            response = api.call(method, path, headers=headers)
            error = error_of(response, 401)
            assert error["type"] == "authentication_error"
            assert error["code"] == "invalid_api_key"
            assert "secret" not in error["message"]
            assert response.headers["www-authenticate"] == "Bearer"
    for path in OPEN:
        assert api.call("GET", path).status_code == 200
    assert not api.frontend.submitted


def test_calls_from_this_process_need_no_key() -> None:
    api = Api(api_keys=("secret",))
    body = b'{"model": "tiny", "prompt": "hi", "max_tokens": 4}'
    call = Call("mine", is_local=True, priority=9)
    status, answer = asyncio.run(post_local(api.app, "/v1/completions", body, call))
    assert status == 200, answer
    assert api.frontend.submitted[0].kwargs["priority"] == 9


def test_the_key_where_anthropics_clients_have_it() -> None:
    api = Api(api_keys=("secret",))
    assert api.call("GET", "/v1/models", headers={"x-api-key": "secret"}).status_code == 200
    assert (
        api.call("GET", "/v1/models", headers={"x-api-key": "wrong", **bearer("secret")}).status_code == 200
    )
    for wrong in ("", "secre", "Bearer secret"):
        error_of(api.call("GET", "/v1/models", headers={"x-api-key": wrong}), 401)
        refused = api.call("POST", "/v1/messages", headers={"x-api-key": wrong})
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
        assert refused.json()["type"] == "error"


def test_no_key_is_asked_for_without_a_setting() -> None:
    assert Api().call("GET", "/v1/models").status_code == 200


def preflight(api: Api, origin: str) -> Any:
    headers = {"origin": origin, "access-control-request-method": "POST",
               "access-control-request-headers": "authorization,content-type"}  # fmt: skip
    return api.call("OPTIONS", "/v1/chat/completions", headers=headers)


def test_cors() -> None:
    api = Api(cors_origins=("http://good",), api_keys=("k",))
    assert preflight(api, "http://good").headers["access-control-allow-origin"] == "http://good"
    assert "access-control-allow-origin" not in preflight(api, "http://bad").headers
    refused = api.call("GET", "/v1/models", headers={"origin": "http://good"})
    assert refused.status_code == 401
    assert (
        refused.headers["access-control-allow-origin"] == "http://good"
    )  # or the page cannot read the error
    assert preflight(Api(cors_origins=("*",)), "http://any").headers["access-control-allow-origin"] == "*"
    assert (
        "access-control-allow-origin"
        not in Api().call("GET", "/livez", headers={"origin": "http://x"}).headers
    )


def test_request_ids() -> None:
    api = Api()
    given = {"x-request-id": "my-id-1"}
    assert api.call("GET", "/v1/models", headers=given).headers["x-request-id"] == "my-id-1"
    assert api.call("GET", "/nothing", headers=given).headers["x-request-id"] == "my-id-1"
    body = {"prompt": "a", "request_id": "from-body"}
    assert api.post("/v1/completions", body).headers["x-request-id"] == "from-body"
    assert api.post("/v1/completions", body, headers=given).headers["x-request-id"] == "my-id-1"
    assert api.post("/v1/completions", {"prompt": "a", "rid": "r"}).headers["x-request-id"] == "r"
    own = {api.call("GET", "/livez").headers["x-request-id"] for _ in range(3)}
    assert len(own) == 3
    for bad in ("x" * 200, "a\tb", "é"):
        answer = api.call("GET", "/livez", headers={"x-request-id": bad.encode("latin-1")})
        assert answer.headers["x-request-id"] != bad
    ids = {api.complete().json()["id"] for _ in range(3)}
    assert len(ids) == 3


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("starting", {"/livez": 200, "/startupz": 503, "/readyz": 503, "/health": 503}),
        ("ready", {"/livez": 200, "/startupz": 200, "/readyz": 200, "/health": 200}),
        ("draining", {"/livez": 200, "/startupz": 200, "/readyz": 503, "/health": 200}),
        ("dead", {"/livez": 503, "/startupz": 503, "/readyz": 503, "/health": 503}),
    ],
)
def test_probes(state: str, expected: dict[str, int]) -> None:
    api = Api()
    api.frontend.state = state
    for path, status in expected.items():
        response = api.call("GET", path)
        assert response.status_code == status, path
        assert response.json() == {"status": state}


@pytest.mark.parametrize("state", ["starting", "draining"])
def test_requests_are_refused_while_not_ready(state: str) -> None:
    api = Api()
    api.frontend.state = state
    response = api.chat()
    error_of(response, 503)
    assert int(response.headers["retry-after"]) >= 1


def test_models_and_version() -> None:
    api = Api(version="1.2.3")
    listed = api.call("GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert [m["id"] for m in listed["data"]] == ["tiny", "alias"]
    assert all(m["object"] == "model" and m["max_model_len"] == 256 for m in listed["data"])
    assert api.call("GET", "/v1/models/alias").json()["root"] == "tiny"
    assert api.call("GET", "/version").json() == {"version": "1.2.3"}


def samples(api: Api) -> dict[str, float]:
    text = api.call("GET", "/metrics").text
    return {
        s.name
        + "".join(f"|{v}" for k, v in sorted(s.labels.items()) if k not in ("engine", "model_name")): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_metrics_of_a_few_requests() -> None:
    api = Api()
    api.chat(n=2)
    events(api.complete(stream=True, max_tokens=5))
    api.chat(temperature="hot")
    api.call("GET", "/nothing")
    got = samples(api)
    num_answer = len("Hello, wörld! 🙂 bye".encode()) + 1
    assert got["vllm:prompt_tokens_total"] == len("<user>hi") + 2
    assert got["vllm:generation_tokens_total"] == 2 * num_answer + 2 + 5
    assert got["vllm:request_success_total|stop"] == 2
    assert got["vllm:request_success_total|length"] == 1
    assert got["vllm:time_to_first_token_seconds_count"] == 3
    assert got["vllm:e2e_request_latency_seconds_count"] == 2
    assert got["vllm:inter_token_latency_seconds_count"] == got["vllm:generation_tokens_total"] - 3
    assert got["vllm:request_queue_time_seconds_sum"] == 0.5
    assert got["vllm:request_params_n_sum"] == 3
    assert got["vllm:num_requests_running"] == 0
    assert got["vllm:kv_cache_usage_perc"] == 0.25
    assert got["quire:http_responses_total|/v1/chat/completions|200"] == 1
    assert got["quire:http_responses_total|/v1/chat/completions|400"] == 1
    assert got["quire:http_responses_total|other|404"] == 1
    assert got["vllm:time_to_first_token_seconds_bucket|+Inf"] == 3


def test_two_apps_do_not_share_metrics() -> None:
    first, second = Api(), Api()
    first.chat()
    assert samples(first)["vllm:request_params_n_count"] == 1
    assert samples(second)["vllm:request_params_n_count"] == 0


def test_log_lines_carry_the_request_id() -> None:
    out = io.StringIO()
    logger = logging.getLogger("quire")
    before = (list(logger.handlers), logger.level, logger.propagate)
    try:
        configure("debug", stream=out, style="json")
        api = Api()
        api.post("/v1/completions", {"prompt": "a", "max_tokens": 3}, headers={"x-request-id": "one"})
        api.post("/v1/completions", {"prompt": 5}, headers={"x-request-id": "two"})
        api.frontend.raises = ZeroDivisionError("detail")
        api.post("/v1/completions", {"prompt": "a"}, headers={"x-request-id": "three"})
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
    done, refused, crashed = (json.loads(line) for line in out.getvalue().splitlines())
    assert (done["event"], done["level"], done["request_id"]) == ("request_done", "debug", "one")
    assert (done["prompt_tokens"], done["output_tokens"]) == (1, 3)
    assert (refused["event"], refused["level"], refused["request_id"]) == ("request_refused", "debug", "two")
    assert (crashed["event"], crashed["level"], crashed["request_id"]) == (
        "request_crashed",
        "error",
        "three",
    )
    assert "ZeroDivisionError: detail" in crashed["traceback"]


CLOSED = "unable to perform operation on <TCPTransport closed=True reading=False 0x1>; the handler is closed"


@pytest.mark.parametrize(("error", "is_raised"), [(CLOSED, False), ("Expected ASGI message", True)])
def test_reset_of_a_client_is_no_error_of_the_server(error: str, is_raised: bool) -> None:
    """Between the reset and the disconnect that the application sees, uvloop raises at each write."""
    sent: list[str] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])
        raise RuntimeError(error)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"x"})

    async def go() -> None:
        scope = {"type": "http", "path": "/v1/models", "headers": []}
        await Edge(app, (), lambda: "id")(scope, app, send)  # type: ignore[arg-type]

    if is_raised:
        with pytest.raises(RuntimeError, match="Expected"):
            asyncio.run(go())
    else:
        asyncio.run(go())
        assert sent == ["http.response.start", "http.response.body"]
