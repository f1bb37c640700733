"""Ollama's API: bodies, lines, durations, what the template and the engine see, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from tests.api.asgi_client import Api
from tests.api.fake_frontend import ANSWER, FakeFrontend, say

CALLS = (
    '<think>Hm.</think>Sure.\n<tool_call>\n{"name": "get", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("get", "now")
]
USER = {"role": "user", "content": "hi"}
PLAIN = "{% for m in messages %}{{ m.content or '' }}{% endfor %}"


def api(text: str = ANSWER, **settings: Any) -> Api:
    frontend = FakeFrontend(lambda prompt, index, seed: say(text), thinks=True)
    return Api(frontend, tool_format="hermes", **settings)


def chat(server: Api, **fields: Any) -> httpx.Response:
    return server.post("/api/chat", {"model": "tiny", "messages": [USER], **fields})


def generate(server: Api, **fields: Any) -> httpx.Response:
    return server.post("/api/generate", {"model": "tiny", "prompt": "hi", "stream": False, **fields})


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def error_of(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    return str(body["error"])


def assembled(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The last line, with the message, the text and the log-probabilities of all lines."""
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    last = found[-1]
    entries = [entry for line in found for entry in line.get("logprobs", ())]
    if entries:
        last["logprobs"] = entries
    where = "message" if "message" in last else "response"
    if where == "response":
        return {**last, "response": "".join(line["response"] for line in found)}
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for line in found:
        for name, value in line["message"].items():
            if name != "role":
                message[name] = message[name] + value if name in message else value
    return {**last, "message": message}


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    assert answer["created_at"].endswith("Z")
    durations = ("total_duration", "prompt_eval_duration", "eval_duration")
    assert all(isinstance(answer[name], int) for name in durations)
    assert answer["total_duration"] >= answer["eval_duration"] >= 0
    kept = {name: value for name, value in answer.items() if name not in (*durations, "created_at")}
    for call in kept.get("message", {}).get("tool_calls", ()):
        assert call.pop("id").startswith("call_")
    return kept


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (ANSWER, {}),
        ("", {}),
        (ANSWER, {"options": {"stop": "wör"}}),
        (ANSWER, {"options": {"num_predict": 3}}),
        (ANSWER, {"logprobs": True, "top_logprobs": 2}),
        (CALLS, {"tools": TOOLS}),
        (CALLS, {"think": True}),
    ],
)
def test_lines_make_the_whole_answer(text: str, fields: dict[str, Any]) -> None:
    whole = chat(api(text), stream=False, **fields).json()
    streamed = assembled(lines(chat(api(text), **fields)))
    assert without_times(streamed) == without_times(whole)


def test_an_answer_has_counts_and_a_reason() -> None:
    answer = chat(api(), stream=False, model="tiny:latest", options={"num_predict": 5}).json()
    assert answer["model"] == "tiny:latest"
    assert (answer["done"], answer["done_reason"]) == (True, "length")
    assert (answer["eval_count"], answer["prompt_eval_count"], answer["load_duration"]) == (5, 8, 0)
    assert chat(api(), stream=False).json()["done_reason"] == "stop"


def test_calls_are_objects_and_thoughts_are_apart() -> None:
    message = chat(api(CALLS), stream=False, tools=TOOLS).json()["message"]
    assert (message["content"], message["thinking"]) == ("Sure.", "Hm.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"index": 0, "name": "get", "arguments": {"city": "Zürich"}},
        {"index": 1, "name": "now", "arguments": {}},
    ]


def test_options_reach_the_engine() -> None:
    server = api()
    options = {
        "num_predict": 7, "seed": 3, "stop": ["x"], "temperature": 0.25, "top_k": 5, "top_p": 0.5, "min_p": 0.1,
        "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25, "typical_p": 0.75, "num_ctx": 99,
    }  # fmt: skip
    response = chat(server, options=options)
    assert response.headers["x-quire-ignored-fields"] == "options.num_ctx"
    sampling = server.frontend.submitted[-1].sampling
    assert (sampling.max_tokens, sampling.seed, sampling.stop, sampling.temperature) == (7, 3, ("x",), 0.25)
    assert (sampling.top_k, sampling.top_p, sampling.min_p, sampling.typical_p) == (5, 0.5, 0.1, 0.75)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (
        1.5,
        0.5,
        0.25,
    )
    for unlimited in (-1, -2, 0):
        chat(server, options={"num_predict": unlimited, "seed": -1})
        assert server.frontend.submitted[-1].sampling.max_tokens is None
        assert server.frontend.submitted[-1].sampling.seed is None


@pytest.mark.parametrize(("given", "kind"), [("json", "json_object"), ({"type": "object"}, "json")])
def test_a_format_holds_the_answer(given: Any, kind: str) -> None:
    server = api()
    assert generate(server, format=given).status_code == 200
    form = server.frontend.submitted[-1].sampling.structured_outputs
    assert form is not None
    assert form.kind == kind
    assert generate(server, format="").status_code == 200
    assert server.frontend.submitted[-1].sampling.structured_outputs is None
    assert "format" in error_of(generate(server, format="xml"))


def test_thinking_is_what_the_template_reads() -> None:
    server = api()
    for think, variables in (
        (True, {"enable_thinking": True, "thinking": True}),
        (False, {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}),
        ("low", {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}),
    ):
        response = chat(server, think=think)
        assert response.status_code == 200
        assert "x-quire-ignored-fields" not in response.headers
        assert variables.items() <= server.frontend.rendered[-1][1].items()
    assert "think" in error_of(chat(server, think="deep"))
    plain = Api(FakeFrontend(template=PLAIN))
    assert chat(plain, think=True).headers["x-quire-ignored-fields"] == "think"


def test_a_history_with_calls_has_ids_for_the_template() -> None:
    server = api()
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("get", "now")]
    turns = [
        USER,
        {"role": "assistant", "thinking": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_name": "now", "content": "12:00"},
        {"role": "tool", "content": "rain"},
    ]
    assert chat(server, messages=turns).status_code == 200
    _, assistant, now, rain = server.frontend.rendered[-1][0]
    assert (assistant["reasoning_content"], assistant["content"]) == ("Hm.", None)
    get_id, now_id = (call["id"] for call in assistant["tool_calls"])
    assert (now["tool_call_id"], now["name"]) == (now_id, "now")
    assert (rain["tool_call_id"], rain["name"]) == (get_id, "get")
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_a_last_message_of_the_assistant_is_continued() -> None:
    server = api()
    chat(server, messages=[USER, {"role": "assistant", "content": "He"}])
    assert server.frontend.rendered[-1][1]["continue_final_message"] is True


def test_generate_renders_the_prompt_and_returns_ids() -> None:
    server = api()
    answer = generate(server, system="Be brief.").json()
    assert answer["response"] == ANSWER
    assert [m["role"] for m in server.frontend.rendered[-1][0]] == ["system", "user"]
    prompt = list(server.frontend.submitted[-1].prompt)
    assert answer["context"] == [*prompt, *say(ANSWER)]
    again = generate(server, context=answer["context"])
    assert list(server.frontend.submitted[-1].prompt)[: len(answer["context"])] == answer["context"]
    assert again.json()["prompt_eval_count"] > answer["prompt_eval_count"]
    streamed = assembled(lines(generate(server, system="Be brief.", stream=True)))
    assert without_times(streamed) == without_times(answer)


def test_a_raw_prompt_is_not_rendered() -> None:
    server = api(CALLS)
    answer = generate(server, raw=True).json()
    assert server.frontend.rendered == []
    assert list(server.frontend.submitted[-1].prompt) == [256, *b"hi"]
    assert answer["response"] == CALLS
    assert "context" not in answer


@pytest.mark.parametrize(
    ("path", "field", "empty"),
    [
        ("/api/chat", "messages", {"message": {"role": "assistant", "content": ""}}),
        ("/api/generate", "prompt", {"response": ""}),
    ],
)
def test_a_request_without_a_prompt_loads(path: str, field: str, empty: dict[str, Any]) -> None:
    server = api()
    for body in ({}, {field: [] if field == "messages" else "", "keep_alive": 0}):
        answer = server.post(path, {"model": "tiny", **body}).json()
        assert answer.pop("created_at")
        assert answer == {"model": "tiny", **empty, "done": True, "done_reason": "load"}
    assert "not served" in error_of(server.post(path, {"model": "other"}), 404)
    server.frontend.state = "starting"
    error_of(server.post(path, {"model": "tiny"}), 503)


def test_embeddings_in_both_forms() -> None:
    server = api()
    answer = server.post("/api/embed", {"model": "tiny", "input": ["a", "b"], "keep_alive": "5m"})
    assert answer.headers["x-quire-ignored-fields"] == "keep_alive"
    value = answer.json()
    assert [round(sum(x * x for x in vector), 5) for vector in value["embeddings"]] == [1.0, 1.0]
    assert value["prompt_eval_count"] == 4
    assert value["total_duration"] > 0
    short = server.post("/api/embed", {"input": "a", "dimensions": 2}).json()["embeddings"]
    assert len(short[0]) == 2
    old = server.post("/api/embeddings", {"prompt": "a"}).json()
    assert set(old) == {"embedding", "prompt_eval_count"}
    assert max(old["embedding"]) > 1.0  # not scaled
    assert server.post("/api/embed", {"input": []}).json() == {"model": "tiny", "embeddings": []}
    long = "x" * 300
    assert server.post("/api/embed", {"input": long}).json()["prompt_eval_count"] == 256
    assert "256" in error_of(server.post("/api/embed", {"input": long, "truncate": False}))


def test_models_are_listed_with_their_tag() -> None:
    server = api()
    models = server.call("GET", "/api/tags").json()["models"]
    assert [model["name"] for model in models] == ["tiny:latest", "alias:latest"]
    assert all(len(model["digest"]) == 64 for model in models)
    (loaded, _) = server.call("GET", "/api/ps").json()["models"]
    assert (loaded["context_length"], loaded["size_vram"]) == (256, 0)
    shown = server.post("/api/show", {"model": models[0]["name"]}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["unknown.context_length"] == 256
    assert "temperature" in shown["parameters"]
    assert server.post("/api/show", {"name": "tiny"}).status_code == 200
    assert server.call("GET", "/api/version").json()["version"]
    assert server.chat(model="tiny:latest").json()["model"] == "tiny"


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/api/pull", "quire pull"),
        ("POST", "/api/push", "publishes no models"),
        ("POST", "/api/create", "--chat-template"),
        ("POST", "/api/copy", "--served-model-name"),
        ("DELETE", "/api/delete", "quire rm"),
        ("POST", "/api/blobs/sha256:0", "FILE.gguf"),
    ],
)
def test_what_changes_models_is_refused_with_a_way(method: str, path: str, words: str) -> None:
    assert words in error_of(api().call(method, path, json={"model": "llama3"}), 501)


def test_a_pull_of_the_served_model_succeeds() -> None:
    assert api().post("/api/pull", {"model": "tiny:latest"}).json() == {"status": "success"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"template": "x"}, "template"),
        ({"messages": [{**USER, "images": ["aGk="]}]}, "messages[0].images[0]"),
        ({"temperature": 0.5}, "options"),
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"num_predict": -5}}, "options.num_predict"),
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"options": {"tempratur": 1}}, "options.tempratur"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert param in error_of(chat(api(), **fields))


def test_an_error_in_a_stream_is_a_line() -> None:
    server = api()
    server.frontend.fail_at = 3
    response = chat(server)
    assert response.status_code == 200
    assert json.loads(response.text.splitlines()[-1])["error"]


def test_bodies_of_curl_are_read_and_those_of_pages_not() -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    body = json.dumps({"model": "tiny", "messages": [USER]})
    assert api().call("POST", "/api/chat", content=body, headers=form).status_code == 200
    for name in ("origin", "referer", "sec-fetch-site"):
        response = api().call("POST", "/api/chat", content=body, headers={**form, name: "http://localhost"})
        assert "Content-Type" in error_of(response, 415)


def test_keys_hold_here_too() -> None:
    server = api(api_keys=("k",))
    error_of(chat(server), 401)
    error_of(server.call("GET", "/api/tags"), 401)
