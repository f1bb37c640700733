"""Clients of llama.cpp and TGI post to their own paths, and read their own forms."""

from __future__ import annotations

import json
from typing import Any

import httpx
from tests.api.asgi_client import Api, error_of
from tests.api.fake_frontend import FakeFrontend, say

PROMPT = {"prompt": "ab", "n_predict": 8}


def _server(text: str = "Hi you") -> Api:
    return Api(FakeFrontend(lambda *_: say(text)))


def _events(answer: httpx.Response) -> list[Any]:
    return [json.loads(line[5:]) for line in answer.text.splitlines() if line.startswith("data:")]


def test_completion_answers_as_llama_cpp() -> None:
    answer = _server().post("/completion", {**PROMPT, "cache_prompt": True, "id_slot": -1}).json()
    assert (answer["content"], answer["stop"], answer["stop_type"]) == ("Hi you", True, "eos")
    assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (7, 2)
    assert answer["timings"]["predicted_n"] == 7
    events = _events(_server().post("/completion", {**PROMPT, "stream": True}))
    assert "".join(event["content"] for event in events) == "Hi you"
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    limited = _server().post("/completion", {**PROMPT, "n_predict": 2}).json()
    assert (limited["content"], limited["stop_type"]) == ("Hi", "limit")
    stopped = _server().post("/completion", {**PROMPT, "stop": ["yo"]}).json()
    assert (stopped["content"], stopped["stop_type"], stopped["stopping_word"]) == ("Hi ", "word", "yo")


def test_completion_has_no_limit_by_default() -> None:
    server = _server()
    assert server.post("/completion", {"prompt": "ab"}).status_code == 200
    assert server.frontend.submitted[-1].sampling.max_tokens is None


def test_infill_says_that_the_model_cannot() -> None:
    body = {"input_prefix": "def f(", "input_suffix": "): pass", "input_extra": [], "n_predict": 4}
    error = error_of(_server().post("/infill", body), 400)
    assert "suffix is not supported by this model" in error["message"]
    assert error_of(_server().post("/infill", {"input_prefix": 5}), 400)["param"] == "input_prefix"


def test_generate_answers_as_tgi() -> None:
    server = _server()
    body = {
        "inputs": "ab",
        "parameters": {"max_new_tokens": 8, "details": True, "seed": 3, "watermark": False},
    }
    answer = server.post("/generate", body).json()
    assert answer["generated_text"] == "Hi you"
    assert answer["details"]["finish_reason"] == "eos_token"
    assert [token["text"] for token in answer["details"]["tokens"]][:2] == ["H", "i"]
    assert server.frontend.submitted[-1].sampling.temperature == 0.0
    full = {"inputs": "ab", "parameters": {"return_full_text": True, "temperature": 0.5}}
    assert server.post("/generate", full).json() == {"generated_text": "abHi you"}
    assert server.frontend.submitted[-1].sampling.temperature == 0.5
    assert error_of(server.post("/generate", {"inputs": 5}), 400)["param"] == "inputs"


def test_generate_stream_has_one_event_per_token() -> None:
    events = _events(_server().post("/generate_stream", {"inputs": "ab"}))
    assert "".join(event["token"]["text"] for event in events) == "Hi you"
    assert [event["index"] for event in events] == list(range(1, 8))
    assert [event["generated_text"] for event in events] == [None] * 6 + ["Hi you"]
    assert events[-1]["details"]["generated_tokens"] == 7
    assert events[-1]["token"]["special"] is True


def test_several_prompts_are_sent_to_completions() -> None:
    error = error_of(_server().post("/completion", {"prompt": ["a", "b"]}), 400)
    assert "/v1/completions takes several" in error["message"]
