"""Whole answers, streams, and that they say the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.api.asgi_client import Api, error_of, events
from tests.api.fake_frontend import ANSWER, END, FakeFrontend, say


def joined(chunks: list[Any], index: int, *, chat: bool) -> dict[str, Any]:
    """One choice of a stream, put together as a client does."""
    text, finish, logprobs, token_ids = "", None, [], []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            text += choice["delta"].get("content", "") if chat else choice["text"]
            finish = choice["finish_reason"] or finish
            token_ids += choice.get("token_ids", [])
            if choice["logprobs"]:
                logprobs.append(choice["logprobs"])
    return {"text": text, "finish": finish, "logprobs": logprobs, "token_ids": token_ids}


def test_whole_chat_answer() -> None:
    api = Api(system_fingerprint="fp_1")
    body = api.chat().json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "tiny"
    assert body["determinism"] == "exact"
    assert body["system_fingerprint"] == "fp_1"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    num_prompt, num_output = len("<user>hi"), len(ANSWER.encode()) + 1
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert api.frontend.submitted[0].kwargs["request_id"] == body["id"]


def test_whole_completion_answer() -> None:
    body = Api().complete().json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]


def test_defaults_of_max_tokens_and_sampling() -> None:
    api = Api()
    api.chat(temperature=None)
    api.post("/v1/completions", {"prompt": "hi"})
    api.chat(max_completion_tokens=5, temperature=0)
    chat, completion, given = (s.sampling for s in api.frontend.submitted)
    assert chat.max_tokens is None  # the frontend makes it the rest of the context
    assert completion.max_tokens == 16
    assert chat.temperature == 0.5  # of generation_config
    assert (given.max_tokens, given.temperature) == (5, 0)


def test_every_sampling_field_arrives() -> None:
    fields: dict[str, Any] = {
        "n": 2, "temperature": 0.75, "top_p": 0.5, "top_k": 4, "min_p": 0.25, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "repetition_penalty": 1.5, "logit_bias": {"65": -100}, "seed": 11, "min_tokens": 2,
        "stop": ["x", "y"], "stop_token_ids": [66], "include_stop_str_in_output": True, "ignore_eos": True,
        "bad_words": ["no"], "allowed_token_ids": [1, 2], "skip_special_tokens": False, "max_tokens": 9,
    }  # fmt: skip
    expected = {
        **fields, "logit_bias": {65: -100}, "stop": ("x", "y"), "stop_token_ids": (66,), "bad_words": ("no",),
        "allowed_token_ids": (1, 2), "logprobs": 3,
    }  # fmt: skip
    api = Api()
    assert api.chat(**fields, logprobs=True, top_logprobs=3).status_code == 200
    assert api.complete(**fields, logprobs=3).status_code == 200
    for submitted in api.frontend.submitted:
        for name, value in expected.items():
            assert getattr(submitted.sampling, name) == value, name


def test_fields_beside_sampling_arrive() -> None:
    api = Api()
    answer = api.chat(priority=-3, cache_salt="s", user="u", request_id="mine")
    assert api.frontend.submitted[0].kwargs == {
        "request_id": answer.json()["id"], "priority": -3, "cache_salt": "s", "tenant": "u",
    }  # fmt: skip
    assert answer.headers["x-request-id"] == "mine"
    api.chat(chat_template_kwargs={"enable_thinking": False}, add_generation_prompt=False)
    assert api.frontend.rendered[-1][1] == {"enable_thinking": False, "add_generation_prompt": False}
    assert api.complete(prompt=["a", [98]], add_special_tokens=False).status_code == 200
    assert [s.prompt for s in api.frontend.submitted[-2:]] == [[97], [98]]
    api.chat(documents=[{"text": "d"}])
    assert api.frontend.rendered[-1][1] == {"documents": [{"text": "d"}]}
    api.chat(continue_final_message=True)
    assert api.frontend.rendered[-1][1] == {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"stop": "wör"},
        {"stop": ["🙂"], "include_stop_str_in_output": True},
        {"max_tokens": 9},  # cuts "ö" in half
        {"return_token_ids": True},
    ],
)
@pytest.mark.parametrize("with_logprobs", [False, True])
def test_stream_equals_whole(chat: bool, fields: dict[str, Any], with_logprobs: bool) -> None:
    if with_logprobs:
        fields = {**fields, **({"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2})}
    api = Api()
    ask = api.chat if chat else api.complete
    whole = ask(**fields).json()
    chunks = events(ask(**fields, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for choice in whole["choices"]:
        got = joined(chunks, choice["index"], chat=chat)
        assert got["text"] == (choice["message"]["content"] if chat else choice["text"])
        assert got["finish"] == choice["finish_reason"]
        assert got["token_ids"] == choice.get("token_ids", [])
        merged: dict[str, list[Any]] = {}
        for part in got["logprobs"]:
            for key, values in part.items():
                merged.setdefault(key, []).extend(values)
        assert merged == (choice["logprobs"] or {})
    assert {c["id"] for c in chunks} == {chunks[0]["id"]}
    assert all(c["determinism"] == "exact" for c in chunks)


def test_chat_stream_has_the_role_then_one_chunk_per_token() -> None:
    chunks = events(Api().chat(stream=True))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["object"] == "chat.completion.chunk"
    texts = [c["choices"][0]["delta"].get("content") for c in chunks[1:]]
    assert texts == [*ANSWER, None]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]


def test_usage_on_every_chunk() -> None:
    chunks = events(Api().complete(stream=True, stream_options={"continuous_usage_stats": True}))
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len(ANSWER.encode()) + 1


def test_stop_reasons() -> None:
    api = Api()
    by_string = api.complete(stop=["wör"]).json()["choices"][0]
    assert (by_string["text"], by_string["finish_reason"], by_string["stop_reason"]) == (
        "Hello, ",
        "stop",
        "wör",
    )
    by_length = api.complete(max_tokens=5).json()["choices"][0]
    assert (by_length["text"], by_length["finish_reason"]) == ("Hello", "length")


def test_n_gives_that_many_choices_in_order() -> None:
    choices = Api().chat(n=3).json()["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2]
    assert [c["message"]["content"] for c in choices] == [ANSWER, ANSWER + " 1", ANSWER + " 2"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "answers"),
    [
        ("ab", ["ab"]),
        ([97, 98], ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        ([[97, 98], [99]], ["ab", "c"]),
        (["ab", [99]], ["ab", "c"]),
    ],
)
def test_prompts_of_every_form(prompt: Any, answers: list[str], stream: bool) -> None:
    def echo(ids: Any, index: int, seed: int) -> list[int]:
        return [*ids, *str(index).encode(), END]

    api = Api(FakeFrontend(echo))
    expected = [f"{a}{i}" for a in answers for i in range(2)]
    if stream:
        chunks = events(api.complete(prompt=prompt, n=2, stream=True))
        got = [joined(chunks, i, chat=False)["text"] for i in range(len(expected))]
    else:
        body = api.complete(prompt=prompt, n=2).json()
        got = [c["text"] for c in body["choices"]]
        assert body["usage"]["prompt_tokens"] == sum(len(a) for a in answers)
    assert got == expected


def test_chat_logprobs() -> None:
    choice = Api(FakeFrontend(lambda *_: say("é"))).chat(logprobs=True, top_logprobs=2).json()["choices"][0]
    first, second, _ = choice["logprobs"]["content"]
    assert first == {
        "token": "�",
        "logprob": -0.25,
        "bytes": [0xC3],
        "top_logprobs": [
            {"token": "�", "logprob": -0.25, "bytes": [0xC3]},
            {"token": "�", "logprob": -1.25, "bytes": [0xC4]},
        ],
    }
    assert second["bytes"] == [0xA9]


def test_completion_logprobs() -> None:
    logprobs = Api(FakeFrontend(lambda *_: say("aéb"))).complete(logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "b", "<|end|>"]
    begin = logprobs["text_offset"][0]  # behind the prompt
    assert begin > 0
    assert [offset - begin for offset in logprobs["text_offset"]] == [0, 1, 1, 2, 3]
    assert logprobs["token_logprobs"] == [-0.25] * 5
    assert logprobs["top_logprobs"][0] == {"a": -0.25, "b": -1.25}


def test_logprobs_without_alternatives() -> None:
    api = Api()
    assert api.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert api.complete(logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"][0] == {"H": -0.25}


def test_tokens_as_ids() -> None:
    body = (
        Api()
        .complete(logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)
        .json()["choices"][0]
    )
    assert body["logprobs"]["tokens"][0] == "token_id:72"
    assert body["token_ids"] == say(ANSWER)
    assert body["prompt_token_ids"] == list(b"hi")
    assert Api().chat(return_token_ids=True).json()["prompt_token_ids"] == list(b"<user>hi")


def test_messages_reach_the_template_as_it_expects_them() -> None:
    api = Api(tool_format="hermes")
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
        {"role": "assistant", "content": None, "refusal": None, "audio": None, "annotations": [], "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]  # fmt: skip
    assert api.chat(messages=messages).status_code == 200
    assert api.frontend.rendered[0][0] == [
        {"role": "system", "content": "be kind"},  # the template does not know developers
        {"role": "user", "content": "a\nb", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_a_sequence(stream: bool) -> None:
    frontend = FakeFrontend()
    frontend.fail_at = 3
    response = Api(frontend).chat(stream=stream)
    if not stream:
        assert error_of(response, 500)["message"] == "boom"
        return
    last = events(response)[-1]
    assert last["error"]["message"] == "boom"
    assert last["error"]["type"] == "server_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_by_the_engine_has_its_own_status(stream: bool) -> None:
    frontend = FakeFrontend()
    api = Api(frontend, retry_after_s=2)
    frontend.refusal = ("The queue is full.", "capacity")
    response = api.chat(stream=stream)
    assert error_of(response, 503)["code"] == "queue_full"
    assert response.headers["retry-after"] == "2"
    frontend.refusal = ("Too big for the cache.", "never_fits")
    # The same body would be told to wait.
    assert error_of(api.chat(stream=stream, seed=1), 400)["code"] == "context_length_exceeded"
    frontend.refusal = ("The engine is gone.", "dead")
    assert error_of(api.chat(stream=stream, seed=2), 503)["code"] == "engine_dead"


def test_chunks_are_json_on_one_line_whatever_the_text() -> None:
    text = 'a\n\n"data: [DONE]\u2028\\ \x00<'
    chunks = events(Api(FakeFrontend(lambda *_: say(text))).complete(stream=True))
    assert joined(chunks, 0, chat=False)["text"] == text
    assert json.dumps(chunks)
