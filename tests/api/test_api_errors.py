"""Bad input: the status, the field, the value and what is allowed, in OpenAI's form."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api.asgi_client import Api, error_of
from tests.api.fake_frontend import FakeFrontend

from quire.errors import CapacityError, EngineDeadError, StepError

JSON = {"content-type": "application/json"}

# (endpoint, fields, param, words of the message)
BAD: list[tuple[str, dict[str, Any], str, list[str]]] = [
    ("chat", {"temperature": "5"}, "temperature", ["'5'", "a number"]),
    ("chat", {"temperature": True}, "temperature", ["True", "a number"]),
    ("chat", {"temperature": -1}, "temperature", ["-1", "0…100"]),
    ("chat", {"top_p": -0.1}, "top_p", ["-0.1", "0…1"]),
    ("chat", {"top_k": -2}, "top_k", ["-2"]),
    ("chat", {"top_k": 1.5}, "top_k", ["1.5", "an integer"]),
    ("chat", {"min_p": 1.5}, "min_p", ["1.5"]),
    ("chat", {"n": 0}, "n", ["0", "1…128"]),
    ("chat", {"n": "2"}, "n", ["'2'", "an integer"]),
    ("chat", {"n": 10**30}, "n", ["1…128"]),
    ("chat", {"presence_penalty": 3}, "presence_penalty", ["3", "-2…2"]),
    ("chat", {"frequency_penalty": -3}, "frequency_penalty", ["-3"]),
    ("chat", {"repetition_penalty": 0}, "repetition_penalty", ["0.000001"]),
    ("chat", {"logit_bias": {"a": 1}}, "logit_bias", ["'a'", "token ids"]),
    ("chat", {"logit_bias": {"1": 101}}, "logit_bias", ["101"]),
    ("chat", {"logit_bias": {"1": "2"}}, "logit_bias", ["token ids to numbers"]),
    ("chat", {"logit_bias": {"9999": 2}}, "logit_bias", ["9999", "0…256"]),
    ("chat", {"logit_bias": [1]}, "logit_bias", ["[1]"]),
    ("chat", {"seed": 2**63}, "seed", [str(2**63)]),
    ("chat", {"seed": 1.5}, "seed", ["1.5"]),
    ("chat", {"max_tokens": 0}, "max_tokens", ["0"]),
    ("chat", {"max_tokens": -2}, "max_tokens", ["-2"]),
    ("chat", {"max_completion_tokens": 0}, "max_completion_tokens", ["0"]),
    ("chat", {"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens", ["5", "6", "contradict"]),
    ("chat", {"max_tokens": 5, "min_tokens": 6}, "min_tokens", ["6", "5"]),
    ("chat", {"stop": 5}, "stop", ["5", "a string or a list of strings"]),
    ("chat", {"stop": ["a", 1]}, "stop", ["list of strings"]),
    ("chat", {"stop_token_ids": ["1"]}, "stop_token_ids", ["integers"]),
    ("chat", {"stop_token_ids": [999]}, "stop_token_ids", ["999", "0…256"]),
    ("chat", {"allowed_token_ids": []}, "allowed_token_ids", ["at least one"]),
    ("chat", {"bad_words": "x"}, "bad_words", ["list of strings"]),
    ("chat", {"ignore_eos": 1}, "ignore_eos", ["true or false"]),
    ("chat", {"stream": "true"}, "stream", ["'true'", "true or false"]),
    ("chat", {"stream_options": {"include_usage": True}}, "stream_options", ["stream = true"]),
    ("chat", {"stream": True, "stream_options": 5}, "stream_options", ["5", "an object"]),
    ("chat", {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", ["1"]),
    ("chat", {"top_logprobs": 2}, "top_logprobs", ["logprobs = true"]),
    ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", ["top_logprobs = 21", "0…20"]),
    ("chat", {"logprobs": "3"}, "logprobs", ["3", "true or false"]),
    ("chat", {"logprobs": 21}, "top_logprobs", ["21", "0…20"]),
    ("chat", {"deadline_ms": 0}, "deadline_ms", ["0", "milliseconds"]),
    ("chat", {"deadline_ms": True}, "deadline_ms", ["True", "first_token"]),
    ("chat", {"deadline_ms": {}}, "deadline_ms", ["empty", "total"]),
    ("chat", {"deadline_ms": {"total": "5"}}, "deadline_ms.total", ["'5'", "a number"]),
    ("chat", {"deadline_ms": {"total": -5}}, "deadline_ms.total", ["-5", "(0, "]),
    ("chat", {"deadline_ms": {"first_tokens": 5}}, "deadline_ms.first_tokens", ["first_token"]),
    ("chat", {"deadline_ms": {"first_token": 9, "total": 5}}, "deadline_ms.first_token", ["9", "5"]),
    ("chat", {"timing": 1}, "timing", ["1", "true or false"]),
    ("chat", {"priority": 1.5}, "priority", ["1.5"]),
    ("chat", {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", ["field of the request"]),
    ("chat", {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", ["contradict"]),
    ("chat", {"tools": [{"type": "function"}]}, "tools[0]", ["function"]),
    ("chat", {"tool_choice": "required"}, "tool_choice", ["'required'", "with tools"]),
    ("chat", {"response_format": "json_object"}, "response_format", ["'json_object'", "an object"]),
    ("chat", {"response_format": {"type": "xml"}}, "response_format.type", ["'xml'", "'json_schema'"]),
    ("chat", {"response_format": {}}, "response_format.type", ["required"]),
    ("chat", {"response_format": {"type": "json_schema"}}, "response_format.json_schema", ["required"]),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
     "response_format.json_schema.schema", ["required", "a JSON schema"]),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}},
     "response_format.json_schema.schema", ["5", "a JSON schema"]),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": 1}}},
     "response_format.json_schema.strict", ["1", "true or false"]),
    ("chat", {"response_format": {"type": "text", "schema": {}}}, "response_format.schema", ["only allowed"]),
    ("chat", {"response_format": {"type": "json_object", "schema": {}, "value": {}}}, "response_format.value",
     ["send one of them"]),
    ("chat", {"response_format": {"type": "json_object", "value": "a"}}, "response_format.value", ["JSON schema"]),
    ("chat", {"response_format": {"type": "regex", "value": {}}}, "response_format.value", ["a string"]),
    ("chat", {"response_format": {"type": "regex"}}, "response_format.value", ["required"]),
    ("chat", {"n_predict": 5, "max_tokens": 6}, "n_predict", ["5", "6", "contradict"]),
    ("chat", {"mirostat": 2}, "mirostat", ["2", "not supported"]),
    ("chat", {"response_format": {"type": "json_object", "json_schema": {}}}, "response_format.json_schema",
     ["only allowed with type 'json_schema'"]),
    ("chat", {"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex",
     ["response_format and guided_regex"]),
    ("chat", {"structured_outputs": {"regex": "a"}, "regex": "a"}, "regex", ["structured_outputs and regex"]),
    ("chat", {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", ["regex and choice"]),
    ("chat", {"structured_outputs": {}}, "structured_outputs", ["empty", "exactly one"]),
    ("chat", {"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", ["did you mean 'regex'"]),
    ("chat", {"structured_outputs": {"choice": []}}, "structured_outputs", ["choice = ()", "at least one"]),
    ("chat", {"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs", ["at least one string"]),
    ("chat", {"structured_outputs": {"json": 5}}, "structured_outputs", ["json = 5", "a JSON schema"]),
    ("chat", {"structured_outputs": {"json_object": False}}, "structured_outputs", ["False", "true"]),
    ("chat", {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "structured_outputs",
     ["belong to json"]),
    ("chat", {"structured_outputs": {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": "a"}},
     "structured_outputs", ["contradict"]),
    ("chat", {"guided_json": {}, "ignore_eos": True}, "ignore_eos", ["guided_json", "EOS"]),
    ("chat", {"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", ["only allowed with guided_json"]),
    ("chat", {"guided_choice": "a"}, "guided_choice", ["'a'", "a list of strings"]),
    ("completions", {"json_schema": 5}, "json_schema", ["5", "a JSON schema"]),
    ("completions", {"ebnf": 5}, "ebnf", ["5", "a string"]),
    ("chat", {"messages": []}, "messages", ["at least one"]),
    ("chat", {"messages": "hi"}, "messages", ["'hi'", "list"]),
    ("chat", {"messages": None}, "messages", ["required"]),
    ("chat", {"messages": ["hi"]}, "messages[0]", ["'hi'", "an object"]),
    ("chat", {"messages": [{"content": "hi"}]}, "messages[0].role", ["required", "'user'"]),
    ("chat", {"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role", ["'king'", "'system'"]),
    ("chat", {"messages": [{"role": "user"}]}, "messages[0].content", ["required"]),
    ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", ["5", "text parts"]),
    ("chat", {"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]", ["'a'"]),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
     "messages[0].content[0].text", ["string"]),
    ("chat", {"messages": [{"role": "user", "content": "a", "function_call": {"name": "f"}}]},
     "messages[0].function_call", ["assistant"]),
    ("chat", {"messages": [{"role": "user", "content": "a", "tool_calls": [
        {"function": {"name": "f", "arguments": "{}"}}]}]}, "messages[0].tool_calls", ["assistant"]),
    ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}]},
     "messages[0].tool_calls[0].function.name", ["5"]),
    ("completions", {"prompt": None}, "prompt", ["required"]),
    ("completions", {"prompt": []}, "prompt", ["not empty"]),
    ("completions", {"prompt": 5}, "prompt", ["5"]),
    ("completions", {"prompt": [1, "a"]}, "prompt[1]", ["'a'", "token id"]),
    ("completions", {"prompt": ["a", 1]}, "prompt[1]", ["1"]),
    ("completions", {"prompt": [[1], [True]]}, "prompt[1][0]", ["True"]),
    ("completions", {"prompt": [[]]}, "prompt[0]", ["not empty"]),
    ("completions", {"prompt": [1, 9999]}, "prompt", ["9999", "0…256"]),
    ("completions", {"prompt": ""}, "prompt", ["empty"]),
    ("completions", {"logprobs": 21}, "logprobs", ["21", "0…20"]),
    ("completions", {"logprobs": True}, "logprobs", ["True", "an integer"]),
    ("completions", {"echo": True, "logprobs": 21}, "logprobs", ["21", "0…20"]),
    ("completions", {"prompt_logprobs": 21}, "prompt_logprobs", ["21", "0…20"]),
    ("completions", {"max_tokens": 0}, "max_tokens", ["0"]),
    ("completions", {"max_tokens": 0, "prompt_logprobs": 0, "min_tokens": 1}, "min_tokens", ["1", "0"]),
    ("chat", {"typical_p": 0}, "typical_p", ["0", "(0, 1]"]),
    ("chat", {"typical_p": "1"}, "typical_p", ["'1'", "a number"]),
    ("completions", {"best_of": 1, "n": 2}, "best_of", ["1", "2…128"]),
    ("completions", {"best_of": 129}, "best_of", ["129"]),
    ("completions", {"best_of": 1.5}, "best_of", ["an integer"]),
    ("completions", {"best_of": 3, "stream": True}, "best_of", ["stream"]),
    ("chat", {"use_beam_search": 1}, "use_beam_search", ["true or false"]),
    ("chat", {"use_beam_search": True, "early_stopping": "often"}, "early_stopping", ["'never'"]),
    ("chat", {"use_beam_search": True, "early_stopping": 1}, "early_stopping", ["'never'"]),
    ("chat", {"use_beam_search": True, "length_penalty": "1"}, "length_penalty", ["a number"]),
    ("chat", {"use_beam_search": True, "length_penalty": 101}, "length_penalty", ["-100…100"]),
    ("chat", {"use_beam_search": True, "temperature": 0.7}, "temperature", ["0.7", "use_beam_search"]),
    ("chat", {"use_beam_search": True, "top_p": 0.9}, "top_p", ["use_beam_search"]),
    ("chat", {"use_beam_search": True, "stop": "a"}, "stop", ["use_beam_search"]),
    ("chat", {"use_beam_search": True, "logit_bias": {"5": 1}}, "logit_bias", ["use_beam_search"]),
    ("chat", {"use_beam_search": True, "min_tokens": 2}, "min_tokens", ["use_beam_search"]),
    ("chat", {"use_beam_search": True, "prompt_logprobs": 1}, "prompt_logprobs", ["use_beam_search"]),
    ("chat", {"use_beam_search": True, "response_format": {"type": "json_object"}}, "structured_outputs", ["beam"]),
    ("chat", {"length_penalty": 2}, "length_penalty", ["without use_beam_search"]),
    ("chat", {"early_stopping": True}, "early_stopping", ["without use_beam_search"]),
    ("chat", {"prompt_logprobs": -1}, "prompt_logprobs", ["-1", "0…20"]),
    ("chat", {"prompt_logprobs": True}, "prompt_logprobs", ["True", "an integer"]),
    ("completions", {"suffix": "x"}, "suffix", ["not supported"]),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_bad_fields_are_named(stream: bool) -> None:
    api = Api()
    for endpoint, fields, param, words in BAD:
        if stream and "stream" not in fields and "stream_options" not in fields:
            fields = {**fields, "stream": True}
        response = api.chat(**fields) if endpoint == "chat" else api.complete(**fields)
        error = error_of(response, 400)
        assert error["param"] == param, (fields, error)
        assert error["type"] == "invalid_request_error"
        for word in words:
            assert word in error["message"], (fields, error["message"])
    assert api.frontend.num_requests == 0


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "f"}},
        {"type": "video_url", "video_url": {"url": "x"}},
    ],
)
def test_parts_that_are_not_text_are_refused_by_name(part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "look"}, part]}]
    error = error_of(Api().chat(messages=messages), 400)
    assert error["param"] == "messages[0].content[1]"
    assert part["type"] in error["message"]
    assert "text only" in error["message"]
    assert "newest message of the user" in error["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[1]", b"5", b'"a"', b"null", b'{"prompt": NaN}', b'{"temperature": Infinity}',
        b'{"temperature": 1e999}', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"a": 1} x',
    ],
)  # fmt: skip
def test_broken_json(raw: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        error = error_of(Api().call("POST", path, content=raw, headers=JSON), 400)
        assert error["param"] is None


def test_duplicate_keys_keep_the_last() -> None:
    raw = b'{"prompt": "a", "max_tokens": 1, "prompt": "b"}'
    api = Api()
    assert api.call("POST", "/v1/completions", content=raw, headers=JSON).status_code == 200
    assert api.frontend.submitted[0].prompt == "b"


def test_a_prompt_that_is_too_long_gives_the_three_numbers() -> None:
    error = error_of(Api().complete(prompt=[1] * 300, max_tokens=7), 400)
    assert error["code"] == "context_length_exceeded"
    assert {"300", "7", "256"} <= set(error["message"].replace(",", " ").replace(":", " ").split())
    error = error_of(Api().complete(prompt=[1] * 250, max_tokens=7), 400)
    assert error["param"] == "max_tokens"
    assert {"250", "7", "256"} <= set(error["message"].replace(",", " ").replace(":", " ").split())


def test_unknown_models_list_those_served() -> None:
    api = Api()
    for response in (
        api.chat(model="gpt-9"),
        api.complete(model="gpt-9"),
        api.call("GET", "/v1/models/gpt-9"),
    ):
        error = error_of(response, 404)
        assert error["code"] == "model_not_found"
        assert "'tiny', 'alias'" in error["message"]
    assert api.chat(model="alias").json()["model"] == "alias"
    assert api.chat(model=None).json()["model"] == "tiny"


def test_paths_and_methods() -> None:
    api = Api()
    assert "/v1/completions" in error_of(api.call("GET", "/v1/nope"), 404)["message"]
    response = api.call("GET", "/v1/completions")
    assert "POST" in error_of(response, 405)["message"]
    assert response.headers["allow"] == "POST"
    error_of(api.call("POST", "/v1/models", json={}), 405)


def test_media_types() -> None:
    api = Api()
    text = {"content-type": "text/plain"}
    error_of(api.call("POST", "/v1/completions", content=b'{"prompt": "a"}', headers=text), 415)
    utf8 = {"content-type": "application/json; charset=utf-8"}
    assert api.call("POST", "/v1/completions", content=b'{"prompt": "a"}', headers=utf8).status_code == 200


def test_bodies_over_the_limit() -> None:
    api = Api(max_body_bytes=100)
    assert "100" in error_of(api.complete(prompt="a" * 100), 413)["message"]

    async def unsized() -> Any:
        for _ in range(20):
            yield b" " * 10

    error_of(api.call("POST", "/v1/completions", content=unsized(), headers=JSON), 413)
    assert api.complete().status_code == 200


@pytest.mark.parametrize(
    ("raised", "status", "code"),
    [
        (CapacityError("full", retryable=True), 503, "unavailable"),
        (CapacityError("never", retryable=False), 400, "context_length_exceeded"),
        (EngineDeadError("gone"), 503, "engine_dead"),
        (StepError("bad step"), 500, "engine_error"),
    ],
)
def test_errors_of_the_frontend(raised: Exception, status: int, code: str) -> None:
    frontend = FakeFrontend()
    frontend.raises = raised
    response = Api(frontend).chat()
    error = error_of(response, status)
    assert error["code"] == code
    assert error["message"] == str(raised)
    assert ("retry-after" in response.headers) == (code == "unavailable")


def test_a_bug_is_a_500_without_details() -> None:
    frontend = FakeFrontend()
    frontend.raises = ZeroDivisionError("secret detail")
    error = error_of(Api(frontend).chat(), 500)
    assert "secret" not in error["message"]
    assert error["type"] == "server_error"


def test_a_prompt_of_a_list_is_all_or_nothing() -> None:
    api = Api()
    error_of(api.complete(prompt=["fine", ""]), 400)
    assert api.frontend.num_requests == 0
