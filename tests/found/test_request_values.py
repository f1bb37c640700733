"""Values that clients send and that were refused, or read otherwise than at the server they were written for."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api.asgi_client import Api
from tests.clients.scripted import frontend

from quire.api.answer_form import tool_use
from quire.api.dialects.openai.fields import ChatRequest
from quire.errors import RequestError
from quire.http.wire import parse
from quire.request import SamplingParams

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fgh"]


def _sampling(server: Api) -> SamplingParams:
    found = server.frontend.submitted[-1].sampling
    assert isinstance(found, SamplingParams)
    return found


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
def test_top_p_of_0_is_the_most_likely_token(path: str) -> None:
    server = Api(frontend())
    body: dict[str, Any] = {"model": "quill", "top_p": 0, "messages": MESSAGES, "max_tokens": 4}
    if path == "/v1/responses":
        body = {"model": "quill", "top_p": 0, "input": "hi"}
    elif path == "/api/chat":
        body = {"model": "quill", "messages": MESSAGES, "stream": False, "options": {"top_p": 0}}
    assert server.post(path, body).status_code == 200
    assert (_sampling(server).top_k, _sampling(server).top_p) == (1, 1.0)
    with pytest.raises(RequestError, match=r"top_p = -0\.1 is not allowed"):
        SamplingParams(top_p=-0.1)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": -1},
        {"stop": ""},
        {"stop": [""]},
        {"stop": []},
        {"modalities": []},
        {"functions": []},
        {"tools": [], "tool_choice": "none"},
        {"logit_bias": {}},
        {"metadata": {}},
        {"stream_options": {}},
        {"stream_options": {"include_usage": False}},
        {"user": None},
        {
            "audio": None,
            "prediction": None,
            "reasoning_effort": None,
            "verbosity": None,
            "service_tier": None,
        },
    ],
)
def test_empty_and_null_fields_ask_for_nothing(fields: dict[str, Any]) -> None:
    server = Api(frontend())
    assert server.chat(model="quill", messages=MESSAGES).status_code == 200
    plain = _sampling(server)
    assert server.chat(model="quill", messages=MESSAGES, **fields).status_code == 200
    assert _sampling(server) == plain


def test_a_user_that_is_an_object_is_its_json() -> None:
    for user in ({"id": 7, "a": "b"}, {"a": "b", "id": 7}, '{"a": "b", "id": 7}'):
        request = parse(ChatRequest, {"messages": MESSAGES, "user": user})
        assert request.user == '{"a": "b", "id": 7}'
    server = Api(frontend())
    assert server.chat(model="quill", messages=MESSAGES, user={"id": 7}).status_code == 200
    assert server.chat(model="quill", messages=MESSAGES, user=7).status_code == 400


def test_allowed_tools_are_the_only_tools() -> None:
    server = Api(frontend())
    for mode in ("auto", "required"):
        named = [{"type": "function", "function": {"name": name}} for name in "hf"]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        assert (
            server.chat(model="quill", messages=MESSAGES, tools=TOOLS, tool_choice=choice).status_code == 200
        )
        form = _sampling(server).structured_outputs
        assert (form is not None) is (mode == "required")
    use = tool_use(TOOLS, choice, None, function=".function")
    assert list(use.schemas) == ["f", "h"]
    assert [tool["function"]["name"] for tool in use.tools] == ["f", "h"]
    assert use.required == ("f", "h")
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {"model": "quill", "input": "hi", "tools": flat, "tool_choice": {
        "type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}}  # fmt: skip
    assert server.post("/v1/responses", body).status_code == 200
    wrong = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "x"}}]},
    }
    answer = server.chat(model="quill", messages=MESSAGES, tools=TOOLS, tool_choice=wrong)
    assert answer.status_code == 400
    assert "tool_choice.allowed_tools.tools[0]" in answer.json()["error"]["message"]


def test_text_offsets_begin_behind_the_prompt() -> None:
    server = Api(frontend())
    for prompt, length in (("abc", 3), ([97, 98], 2)):
        body = {"model": "quill", "prompt": prompt, "logprobs": 0, "max_tokens": 2}
        offsets = server.complete(**body).json()["choices"][0]["logprobs"]["text_offset"]
        assert offsets[0] == length
        echoed = server.complete(**body, echo=True).json()["choices"][0]["logprobs"]["text_offset"]
        assert echoed[0] == 0


def test_a_window_of_penalties_is_taken() -> None:
    server = Api(frontend())
    body = {"model": "quill", "messages": MESSAGES, "stream": False}
    for last_n, expected in ((64, 64), (-1, None), (0, 0)):
        options = {"repeat_last_n": last_n, "repeat_penalty": 1.1}
        assert server.post("/api/chat", {**body, "options": options}).status_code == 200
        assert _sampling(server).repeat_last_n == expected
    assert (
        server.chat(model="quill", messages=MESSAGES, repeat_last_n=8, presence_penalty=1).status_code == 200
    )
    assert _sampling(server).repeat_last_n == 8
