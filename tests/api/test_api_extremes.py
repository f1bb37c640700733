"""No value breaks the books: extreme values of every field, through a real frontend, supervisor, wire and core."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from datetime import datetime
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tests.api.asgi_client import app_with_jobs
from tests.engine.toy import byte_tokenizer, engine_config, model_info
from tests.engine.wired import WiredClient
from tests.fakes.engine import FAKE

from quire.api.dialects.anthropic.request import CountTokensRequest, MessagesRequest
from quire.api.dialects.openai.fields import ChatRequest, CompletionRequest
from quire.api.dialects.openai.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from quire.api.dialects.responses.request import ResponsesRequest
from quire.clock import WallClock
from quire.engine.client import EngineClient
from quire.engine.frontend import Frontend
from quire.engine.process import ProcessClient
from quire.engine.supervisor import RestartPolicy, Supervisor
from quire.http.field_rules import Use, field_table
from quire.http.wire import Wire
from quire.text.chat_template import ChatTemplate

TURN = {"role": "user", "content": "hi"}
CHAT = {"messages": [TURN], "max_tokens": 3}
RERANK = {"query": "a", "documents": ["b", "c"]}
ENDPOINTS: dict[str, tuple[type[Wire], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, CHAT),
    "/v1/completions": (CompletionRequest, {"prompt": "hi", "max_tokens": 3}),
    "/v1/responses": (ResponsesRequest, {"input": "hi", "max_output_tokens": 3}),
    "/v1/messages": (MessagesRequest, CHAT),
    "/v1/messages/count_tokens": (CountTokensRequest, {"messages": [TURN]}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "hi"}),
    "/v1/rerank": (RerankRequest, RERANK),
    "/v1/score": (ScoreRequest, {"text_1": "a", "text_2": "b"}),
}
FIELDS = sorted(
    (path, name)
    for path, (model, _) in ENDPOINTS.items()
    for name, rule in field_table(model).items()
    if rule.use is Use.USED
)
# Python itself writes no int of more than 4,300 digits: the mark becomes one in the raw body.
DIGITS = "<4301 digits>"
INTEGERS = [
    *(sign * 2**bits + off for bits in (31, 32, 53, 63, 64, 128) for sign in (1, -1) for off in (-1, 0, 1)),
    *(0, 1, -1, 10**400, -(10**4000), DIGITS),
]
FLOATS = [1e308, -1e308, 5e-324, -0.0, 0.5, 1e-45, 2.0**64, float("nan"), float("inf"), float("-inf")]
STRINGS = [
    "",
    "\0",
    "\ud800",
    "a\udfff",
    '"\\ud800"',
    '{"a": "\\ud800"}',
    "9" * 4301,
    "🙂",
    "-1",
    "NaN",
    "\x7f\u2028",
]
SCALARS = st.sampled_from([*INTEGERS, *FLOATS, *STRINGS, True, None])
KEYS = st.sampled_from(
    ["5", str(2**31), str(2**63), str(2**64), "9" * 4301, "-1", "\ud800", "٣", "²", "1e3", ""]
)


def call_with(arguments: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [TURN, {"role": "assistant", "tool_calls": [call]}]}


# Fields whose extremes lie inside an object.
INSIDE: dict[str, Callable[[Any], Any]] = {
    "messages": lambda v: [{"role": "user", "content": v}],
    "tools": lambda v: [{"type": "function", "function": {"name": v, "parameters": {"minimum": v}}}],
    "deadline_ms": lambda v: {"total": v},
    "thinking": lambda v: {"type": "enabled", "budget_tokens": v},
    "response_format": lambda v: {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"const": v}},
    },
    "structured_outputs": lambda v: {"choice": [v]},
    "guided_json": lambda v: {"type": "integer", "maximum": v},
    "json_schema": lambda v: {"type": "string", "minLength": v},
    "chat_template_kwargs": lambda v: {"kwarg": v},
    "metadata": lambda v: {"user_id": v},
    "prompt": lambda v: [v],
    "input": lambda v: [v],
    "documents": lambda v: [v, {"text": v}],
}


def values_of(name: str) -> st.SearchStrategy[Any]:
    inside = INSIDE.get(name)
    some = [SCALARS, st.lists(SCALARS, max_size=2), st.dictionaries(KEYS, SCALARS, max_size=2)]
    return st.one_of(*some, *([SCALARS.map(inside)] if inside else []))


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path, and a valid body of which up to two fields are extreme."""
    path, name = draw(st.sampled_from(FIELDS))
    model, base = ENDPOINTS[path]
    body = {**base, name: draw(values_of(name))}
    if draw(st.integers(0, 3)) == 0:
        other = draw(st.sampled_from([other for at, other in FIELDS if at == path]))
        body[other] = draw(values_of(other))
    if draw(st.booleans()) and "stream" in field_table(model):
        body.setdefault("stream", True)
    return path, raw_of(body)


def raw_of(body: Any) -> bytes:
    """JSON with what JSON has not: NaN, lone surrogates (escaped) and an int of 4,301 digits."""
    raw = json.dumps(body)
    return raw.replace(json.dumps(DIGITS), "9" * 4301).encode()


class Served:
    """The app over a frontend, a supervisor and ``client``; the books are checked after every request."""

    def __init__(self, first: EngineClient, restart: Callable[[], EngineClient]) -> None:
        self._runner = asyncio.Runner()
        tokenizer = byte_tokenizer()
        template = ChatTemplate.of(tokenizer, datetime.now)
        template.is_known = True  # rendered without a helper process
        self.supervisor = Supervisor(first, restart, WallClock(), RestartPolicy(backoff_s=0.0))
        self.frontend = Frontend(self.supervisor, tokenizer, template, model_info(), WallClock())
        self._app = app_with_jobs(self.frontend)
        self._runner.run(self.frontend.start())

    def post(self, path: str, raw: bytes) -> httpx.Response:
        return self._runner.run(self._post(path, raw))

    async def _post(self, path: str, raw: bytes) -> httpx.Response:
        transport = httpx.ASGITransport(app=self._app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            sent = client.post(path, content=raw, headers={"content-type": "application/json"})
            return await asyncio.wait_for(sent, 60)

    async def _idle(self) -> None:
        """Wait for responses in the background."""
        for _ in range(6000):
            if not self.frontend.num_requests:
                return
            await asyncio.sleep(0.01)

    def check(self, path: str, raw: bytes) -> httpx.Response:
        """Send a body: an answer below 500, and nothing left behind."""
        answer = self.post(path, raw)
        self._runner.run(self._idle())
        said = f"{path} {raw!r:.600} -> {answer.status_code} {answer.text:.600}"
        if b"deadline_ms" not in raw:  # else 504 is the right answer to a deadline of 5e-324 ms
            assert answer.status_code < 500, said
            assert '"server_error"' not in answer.text, said
            assert '"api_error"' not in answer.text, said
        assert answer.status_code in (200, 400, 404, 504), said
        assert answer.status_code == 200 or len(answer.text) < 2000, said
        assert self.frontend.num_requests == 0, said
        assert len(self.supervisor.record) == 0, said
        assert self.supervisor.num_restarts == 0, said
        assert self.frontend.state == "ready", said
        return answer

    def alive(self) -> None:
        answer = self.post("/v1/completions", raw_of({"prompt": "hi", "max_tokens": 3, "seed": 1}))
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 3

    def close(self) -> None:
        """Stop as SIGTERM does. A request that is left would hold it until the test's own limit."""
        self._runner.run(self.frontend.drain(3600.0))
        self._runner.run(self.frontend.close())
        self._app.state.quire.bodies.close()
        self._runner.close()


def wired() -> WiredClient:
    return WiredClient(engine_config(), WallClock(), executor=FAKE)


@pytest.fixture(scope="module")
def served() -> Any:
    made = Served(wired(), wired)
    yield made
    made.close()


# What once was a 500, a stream that never ended, or an engine that could not be restarted.
FOUND: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {**CHAT, "priority": 2**64}, "priority"),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 3, "priority": -(2**63) - 1}, "priority"),
    ("/v1/messages", {**CHAT, "priority": 2**200}, "priority"),
    ("/v1/responses", {"input": "hi", "priority": 2**64}, "priority"),
    ("/v1/embeddings", {"input": "hi", "priority": 2**64}, "priority"),
    ("/v1/rerank", {**RERANK, "priority": 2**64}, "priority"),
    ("/v1/chat/completions", {**CHAT, "logit_bias": {"9" * 4301: 1}}, "logit_bias"),
    ("/v1/chat/completions", {**CHAT, "thinking_token_budget": 2**64}, "thinking_token_budget"),
    (
        "/v1/messages",
        {**CHAT, "thinking": {"type": "enabled", "budget_tokens": 2**64}},
        "thinking.budget_tokens",
    ),
    ("/v1/chat/completions", {**CHAT, "n": -1, "stream": True}, "n"),
    ("/v1/completions", {"prompt": "hi", "n": -(2**64), "stream": True}, "n"),
    (
        "/v1/completions",
        {"prompt": "hi", "max_tokens": 3, "repetition_penalty": 5e-324},
        "repetition_penalty",
    ),
]


@pytest.mark.parametrize(("path", "body", "param"), FOUND)
def test_extreme_value_is_named(served: Served, path: str, body: dict[str, Any], param: str) -> None:
    answer = served.check(path, raw_of(body))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert param in error["message"]
    assert "must be" in error["message"]
    assert error.get("param", param) == param
    assert len(error["message"]) < 400
    served.alive()


@seed(16)
@settings(
    max_examples=int(os.environ.get("EXTREMES", "1500")),
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(request=bodies())
def test_no_extreme_value_breaks_the_books(served: Served, request: tuple[str, bytes]) -> None:
    served.check(*request)


@pytest.mark.parametrize(
    ("bias", "status"), [({"9" * 4301: 1}, 400), ({str(2**31): 1}, 400), ({"0" * 99 + "5": 1}, 200)]
)
def test_bias_of_huge_ids(served: Served, bias: dict[str, float], status: int) -> None:
    assert served.check("/v1/chat/completions", raw_of({**CHAT, "logit_bias": bias})).status_code == status


@pytest.mark.parametrize("edge", [-(2**63), -1, 2**31, 2**63 - 1])
def test_priorities_of_64_bits_are_served(served: Served, edge: int) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/rerank"):
        answer = served.check(path, raw_of({**ENDPOINTS[path][1], "priority": edge}))
        assert answer.status_code == 200, answer.text


def test_real_process_restarts_after_extremes() -> None:
    """The engine is killed after hostile requests: its replacement is ready, and closing waits for no stream."""
    started: list[ProcessClient] = []

    def start() -> ProcessClient:
        started.append(ProcessClient(engine_config(), executor=FAKE))
        return started[-1]

    served = Served(start(), start)
    for path, body, _ in FOUND:
        assert served.check(path, raw_of(body)).status_code == 400
    for path, name in FIELDS[::3]:
        if "object" not in name and "guided" not in name:  # grammars have a test of their own
            for value in (2**64, -(2**63) - 1, 1e308, float("nan"), "\ud800", {"9" * 4301: 1}):
                served.check(path, raw_of({**ENDPOINTS[path][1], name: value}))
    served.alive()
    os.kill(started[0].pid, signal.SIGKILL)
    served.alive()
    assert len(started) == 2
    assert served.supervisor.num_restarts == 1
    served.close()


GRAMMARS: list[dict[str, Any]] = [
    {"guided_regex": "(" * 50_000 + "a" + ")" * 50_000},
    {"guided_grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
    {"guided_json": {"type": "string", "minLength": 2**64}},
    {"guided_json": {"type": "integer", "maximum": 10**400}},
    {"guided_json": json.dumps({"const": "\ud800"})},
    {"guided_choice": ["a" * 600_000] * 2},
]


@pytest.mark.parametrize("form", GRAMMARS)
def test_too_complex_grammar_is_a_400(served: Served, form: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    answer = served.check("/v1/completions", raw_of({"prompt": "hi", "max_tokens": 3, **form}))
    assert answer.status_code == 400
    (name,) = form
    assert name in answer.json()["error"]["message"]
