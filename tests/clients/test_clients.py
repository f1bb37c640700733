"""Request bodies as third-party clients send them are accepted, and each part of them does what it says."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tests.api.asgi_client import Api, error_of
from tests.api.fake_frontend import FakeFrontend

from quire.api.dialects.openai.fields import ChatRequest
from quire.http.field_rules import edits, field_table
from quire.http.wire import Ignored, sift

REQUESTS = json.loads((Path(__file__).parent / "requests.json").read_text())
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}


def listed(response: Any) -> str:
    return str(response.headers.get("x-quire-ignored-fields", ""))


def sent(**fields: Any) -> Any:
    """The sampling that a chat completion with ``fields`` asks the engine for."""
    api = Api()
    response = api.chat(**fields)
    assert response.status_code == 200, response.text
    return api.frontend.submitted[-1].sampling


@pytest.mark.parametrize("request_", REQUESTS, ids=[request["client"] for request in REQUESTS])
def test_a_client_is_answered_and_told_what_was_ignored(request_: dict[str, Any]) -> None:
    settings = {"tool_format": request_["tool_format"]} if "tool_format" in request_ else {}
    response = Api(FakeFrontend(thinks=True, max_model_len=1024), **settings).post(
        request_["path"], request_["body"]
    )
    assert response.status_code == 200, response.text
    assert sorted(listed(response).split(", ")) == sorted(request_["ignored"].split(", "))


def test_a_history_with_functions_becomes_calls_and_results() -> None:
    api = Api(tool_format="hermes")
    body = next(r["body"] for r in REQUESTS if "functions of before" in r["client"])
    assert api.post("/v1/chat/completions", body).status_code == 200
    _, call, result = api.frontend.rendered[-1][0]
    assert call["tool_calls"][0]["function"] == {"name": "get", "arguments": {"city": "Bern"}}
    assert (result["role"], result["name"], result["content"]) == ("tool", "get", "9 °C")


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_object", "value": SCHEMA},
        {"type": "json", "value": SCHEMA},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    ],
)
def test_a_schema_holds_wherever_a_client_puts_it(form: dict[str, Any]) -> None:
    outputs = sent(response_format=form).structured_outputs
    assert json.loads(outputs.json) == SCHEMA if isinstance(outputs.json, str) else outputs.json == SCHEMA


def test_other_names_of_fields_do_what_ours_do() -> None:
    assert sent(n_predict=7).max_tokens == 7
    assert sent(max_new_tokens=7).max_tokens == 7
    assert sent(repeat_penalty=1.5).repetition_penalty == 1.5
    assert sent(grammar='root ::= "a"').structured_outputs.grammar == 'root ::= "a"'
    assert sent(stop_sequences=["x"]).stop == ("x",)
    api = Api()
    assert api.post("/v1/responses", {"input": "hi", "max_tokens": 7}).status_code == 200
    assert api.frontend.submitted[-1].sampling.max_tokens == 7


def test_minus_one_is_the_rest_of_the_context() -> None:
    assert sent(max_tokens=-1).max_tokens == sent().max_tokens
    api = Api()
    assert api.complete(max_tokens=-1).status_code == 200
    assert api.frontend.submitted[-1].sampling.max_tokens == sent().max_tokens


def test_logprobs_of_a_chat_may_be_a_number() -> None:
    first = Api().chat(logprobs=1).json()["choices"][0]["logprobs"]["content"][0]
    assert len(first["top_logprobs"]) == 1
    assert Api().chat(logprobs=0).json()["choices"][0]["logprobs"] is None


def test_an_assistant_may_say_nothing() -> None:
    api = Api()
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "b"},
    ]
    assert api.chat(messages=turns).status_code == 200
    assert api.frontend.rendered[-1][0][1] == {"role": "assistant", "content": ""}


def test_whole_floats_are_integers_everywhere() -> None:
    assert sent(max_tokens=5.0, seed=3.0, stop_token_ids=[7.0]).stop_token_ids == (7,)
    api = Api()
    assert api.complete(prompt=[104.0, 105.0]).status_code == 200
    assert list(api.frontend.submitted[-1].prompt) == [104, 105]
    assert api.post("/detokenize", {"tokens": [104.0, 105.0]}).json() == {"prompt": "hi"}
    assert api.post("/v1/responses", {"input": "hi", "max_output_tokens": 7.0}).status_code == 200
    turn = {"role": "user", "content": "hi"}
    assert api.post("/v1/messages", {"messages": [turn], "max_tokens": 7.0}).status_code == 200
    assert error_of(api.complete(prompt=[104.5]), 400)["param"] == "prompt[0]"
    assert error_of(api.complete(prompt=[104, 1.5]), 400)["param"] == "prompt[1]"


def test_tools_and_choices_need_no_type() -> None:
    api = Api(tool_format="hermes")
    untyped = {"function": TOOL["function"]}
    response = api.chat(tools=[untyped], tool_choice={"function": {"name": "get"}})
    assert response.status_code == 200, response.text
    assert api.frontend.rendered_tools[-1] == [TOOL]
    assert api.frontend.submitted[-1].sampling.structured_outputs.structural_tag is not None


def test_an_effort_without_reasoning_is_listed() -> None:
    plain = FakeFrontend(template="{% for m in messages %}{{ m.content or '' }}{% endfor %}")
    response = Api(plain).chat(reasoning_effort="high")
    assert response.status_code == 200
    assert listed(response) == "reasoning_effort"
    answer = Api(plain).post("/v1/responses", {"input": "hi", "reasoning": {"effort": "low"}})
    assert listed(answer) == "reasoning.effort"


@pytest.mark.parametrize(
    "edit",
    [
        {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 0}},
        {
            "type": "clear_tool_uses_20250919",
            "trigger": {"type": "input_tokens", "value": 5},
            "keep": {"value": 0},
        },
        {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 5}},
        {"type": "unheard_of"},
        5,
    ],
)
def test_edits_that_may_trigger_are_refused(edit: Any) -> None:
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""},
                                          {"type": "tool_use", "id": "t", "name": "get", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "12"}]},
    ]  # fmt: skip
    body = {"max_tokens": 9, "messages": turns, "context_management": {"edits": [edit]}}
    response = Api().post("/v1/messages", body)
    assert response.status_code == 400, response.text
    assert "context_management.edits[0]" in response.json()["error"]["message"]


def test_compaction_below_the_context_is_refused() -> None:
    rules = [{"type": "compaction", "compact_threshold": 100}]
    error = error_of(Api().post("/v1/responses", {"input": "hi", "context_management": rules}), 400)
    assert error["param"] == "context_management[0]"


def test_unknown_names_pass_and_misspelled_ones_do_not() -> None:
    api = Api()
    assert listed(api.chat(colour="red", topp=1)) == "colour, topp"  # of four letters
    for name in ("temprature", "top_kk", "strema", "max_tokenz"):
        error = error_of(api.chat(**{name: 1}), 400)
        assert (error["param"], error["code"]) == (name, "unknown_parameter")
        assert "did you mean" in error["message"]
    assert error_of(Api(strict_fields=True).chat(colour="red"), 400)["param"] == "colour"
    assert listed(Api(lenient=True).chat(temprature=1)) == "temprature"


def test_ignored_fields_are_counted() -> None:
    api = Api()
    api.chat(colour="red", metadata={})
    assert api.app.state.quire.metrics.counters["quire:ignored_fields"] == 2


def test_many_ignored_fields_make_a_short_header() -> None:
    header = listed(Api().chat(**{f"colour{i:03}": "é" for i in range(200)}, **{"ä\r\nx": 1}))
    assert header.endswith("and 181 more")
    assert len(header) < 400


def test_a_body_of_many_unknown_names_is_judged_quickly() -> None:
    names = {f"top_log{a}{b}{c}": 1 for a in "abcdefghij" for b in "probsx" for c in range(800)}
    ignored = Ignored()
    start = time.process_time()
    sift(names, field_table(ChatRequest), ignored=ignored)
    assert time.process_time() - start < 2.0
    assert len(ignored) == 1000


def test_edits_are_counted_with_swaps() -> None:
    assert [
        edits("temprature", "temperature"),
        edits("strema", "stream"),
        edits("", "abc"),
        edits("a", "a"),
    ] == [1, 1, 3, 0]
    assert edits("thread", "seed") == 4


def test_input_tokens_counts_what_a_response_would() -> None:
    api = Api()
    body = {"input": "hi", "instructions": "Be brief."}
    counted = api.post("/v1/responses/input_tokens", body).json()
    used = api.post("/v1/responses", body).json()["usage"]["input_tokens"]
    assert counted == {"object": "response.input_tokens", "input_tokens": used}
