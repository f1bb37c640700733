"""Log-probabilities of a response's text: those of a chat without its reasoning and calls, streamed as whole."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api.asgi_client import Api, error_of
from tests.api.fake_frontend import FakeFrontend, say
from tests.api.test_api_responses import CALLS, TOOLS, ask, events

WANTED = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def api(text: str) -> Api:
    return Api(FakeFrontend(lambda prompt, index, seed: say(text), max_model_len=1024), tool_format="hermes")


def texts(response: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for item in response["output"] if item["type"] == "message" for part in item["content"]]


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("Hello 🙂", {}),
        ("🙂", {}),
        ("<think>Hm.</think>Hello wörld", {}),
        ("<think>Hm.</think>Hello", {"max_output_tokens": 20}),
        ("", {}),
        (CALLS, {"tools": TOOLS}),
    ],
)
def test_they_are_those_of_the_text(text: str, fields: dict[str, Any]) -> None:
    whole = ask(api(text), **fields, **WANTED).json()
    for part in texts(whole):
        assert b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode() == part["text"]
        for entry in part["logprobs"]:
            assert set(entry) == {"token", "bytes", "logprob", "top_logprobs"}
            assert len(entry["top_logprobs"]) == 2
    told = events(ask(api(text), stream=True, **fields, **WANTED))
    ended = told[-1]["response"]
    assert [part["logprobs"] for part in texts(ended)] == [part["logprobs"] for part in texts(whole)]
    for i, item in enumerate(ended["output"]):
        mine = [
            e for e in told if e.get("output_index") == i and e["type"].startswith("response.output_text.")
        ]
        deltas = [entry for e in mine if e["type"].endswith(".delta") for entry in e["logprobs"]]
        done = [e["logprobs"] for e in mine if e["type"].endswith(".done")]
        if item["type"] == "message":
            assert done == [deltas] == [item["content"][0]["logprobs"]]
        else:
            assert mine == []


def test_without_alternatives() -> None:
    (part,) = texts(ask(api("Hello"), **{**WANTED, "top_logprobs": 0}).json())
    assert [entry["token"] for entry in part["logprobs"]] == list("Hello")
    assert part["logprobs"][0]["top_logprobs"] == []


def test_logprobs_are_empty_unless_asked_for_or_are_refused() -> None:
    server = api("Hello")
    for fields in ({}, {"include": []}, {"include": ["reasoning.encrypted_content"]}, {"top_logprobs": 0}):
        (part,) = texts(ask(server, **fields).json())
        assert part["logprobs"] == []
    for fields, param in (
        ({"top_logprobs": 2}, "top_logprobs"),
        ({**WANTED, "top_logprobs": 21}, "top_logprobs"),
        ({**WANTED, "top_logprobs": "2"}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"include": "x"}, "include"),
    ):
        assert error_of(ask(server, **fields), 400)["param"] == param
