"""Tool calls and reasoning in chat answers: streamed as whole, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.api.asgi_client import Api, error_of, events
from tests.api.fake_frontend import FakeFrontend, say

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get",
            "description": "d",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CALLS = (
    '<think>Hm.</think>Sure.\n<tool_call>\n{"name": "get", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)


def api(text: str, **settings: Any) -> Api:
    return Api(FakeFrontend(lambda prompt, index, seed: say(text)), tool_format="hermes", **settings)


def streamed(api: Api, **fields: Any) -> tuple[dict[str, Any], str]:
    """(message, finish_reason) as a client puts them together."""
    message: dict[str, Any] = {}
    finish = ""
    for chunk in events(api.chat(stream=True, **fields)):
        for choice in chunk["choices"]:
            delta = {k: v for k, v in choice["delta"].items() if k != "role" and v != ""}
            merge_message(message, delta)
            finish = choice["finish_reason"] or finish
    return message, finish


def merge_message(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to a message, as a client of the stream does."""
    for name, value in delta.items():
        if name != "tool_calls":
            message[name] = (message.get(name) or "") + value
            continue
        calls = message.setdefault("tool_calls", [])
        for part in value:
            if "id" in part:
                calls.append({**part, "function": dict(part["function"])})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls", ())
    assert len({call["id"] for call in calls}) == len(calls)
    kept = {k: v for k, v in message.items() if k not in ("role", "refusal", "tool_calls") and v is not None}
    return {**kept, "calls": [(c["type"], c["function"]["name"], c["function"]["arguments"]) for c in calls]}


def test_calls_and_reasoning_streamed_as_whole() -> None:
    expected = {
        "content": "Sure.",
        "reasoning": "Hm.",
        "reasoning_content": "Hm.",
        "calls": [("function", "get", '{"city": "Zürich"}'), ("function", "now", "{}")],
    }
    (choice,) = api(CALLS).chat(tools=TOOLS, max_tokens=200).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert without_ids(choice["message"]) == expected
    message, finish = streamed(api(CALLS), tools=TOOLS, max_tokens=200)
    assert finish == "tool_calls"
    assert without_ids(message) == expected


def test_without_tools_calls_are_text() -> None:
    (choice,) = api(CALLS).chat(max_tokens=200).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"].endswith("</tool_call>")
    assert choice["message"]["reasoning"] == "Hm."
    (choice,) = api(CALLS).chat(tools=TOOLS, tool_choice="none", max_tokens=200).json()["choices"]
    assert "tool_calls" not in choice["message"]


def test_one_call_where_they_may_not_be_parallel() -> None:
    fields = {"tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 200}
    (choice,) = api(CALLS).chat(**fields).json()["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get"]
    message, _ = streamed(api(CALLS), **fields)
    assert len(message["tool_calls"]) == 1


def test_reasoning_left_out_or_left_in_place() -> None:
    text = "<think>Hm.</think>Yes"
    (choice,) = api(text).chat(include_reasoning=False).json()["choices"]
    assert without_ids(choice["message"]) == {"content": "Yes", "calls": []}
    (choice,) = api(text).chat(separate_reasoning=False).json()["choices"]
    assert choice["message"]["content"] == text


def test_an_answer_cut_in_a_call_says_so() -> None:
    (choice,) = api(CALLS).chat(tools=TOOLS, max_tokens=70).json()["choices"]
    assert choice["finish_reason"] == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])


def test_special_tokens_are_read_and_hidden() -> None:
    plain = Api(FakeFrontend(lambda prompt, index, seed: [*b"a", 256]), tool_format="hermes")
    (choice,) = plain.chat(ignore_eos=True, max_tokens=2, tools=TOOLS).json()["choices"]
    assert choice["message"]["content"] == "a"
    (choice,) = plain.chat(ignore_eos=True, max_tokens=2, tools=TOOLS, skip_special_tokens=False).json()[
        "choices"
    ]
    assert choice["message"]["content"] == "a<|end|>"


def test_the_template_sees_the_tools() -> None:
    frontend = FakeFrontend()
    Api(frontend, tool_format="hermes").chat(tools=TOOLS, reasoning_effort="low")
    assert frontend.rendered_tools[-1] == TOOLS
    assert frontend.rendered[-1][1] == {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}


def test_tools_that_are_not_to_be_called_stay_in_the_prompt() -> None:
    """An agent's last turn, which forbids calls, finds the turns before it in the cache."""
    frontend = FakeFrontend()
    hermes = Api(frontend, tool_format="hermes")
    hermes.chat(tools=TOOLS)
    hermes.chat(tools=TOOLS, tool_choice="none", bad_words=["no"])
    assert frontend.rendered_tools == [TOOLS, TOOLS]
    assert [each.sampling.bad_words for each in frontend.submitted] == [(), ("no", "<tool_call>")]
    hermes.chat(tools=TOOLS, tool_choice="none", use_beam_search=True, n=2)
    assert frontend.submitted[-1].sampling.bad_words == ()


def test_tools_are_not_shown_where_calls_have_no_mark() -> None:
    frontend = FakeFrontend()
    Api(frontend, tool_format="llama3-json").chat(tools=TOOLS, tool_choice="none")
    assert frontend.rendered_tools == [None]
    assert frontend.submitted[-1].sampling.bad_words == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": 3}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"function": {"name": "a", "parameter": {}}}]}, "tools[0].function.parameter"),
        ({"tools": [*TOOLS, TOOLS[1]]}, "tools[2]"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0]"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ],
)
def test_bad_tools_name_the_field(fields: dict[str, Any], param: str) -> None:
    assert error_of(Api().chat(**fields), 400)["param"] == param


def test_a_required_call_constrains_the_answer() -> None:
    for choice, names in (
        ("required", ["get", "now"]),
        ({"type": "function", "function": {"name": "now"}}, ["now"]),
    ):
        server = api(CALLS)
        assert server.chat(tools=TOOLS, tool_choice=choice, max_tokens=200).status_code == 200
        form = server.frontend.submitted[-1].sampling.structured_outputs
        assert form is not None
        text = json.dumps(form.structural_tag)
        assert [name for name in ("get", "now") if f'\\"{name}\\"' in text] == names


def test_a_required_call_wins_over_another_form() -> None:
    server, forms = api(CALLS), []
    for form in ({}, {"response_format": {"type": "json_object"}}):
        assert server.chat(tools=TOOLS, tool_choice="required", max_tokens=200, **form).status_code == 200
        forms.append(server.frontend.submitted[-1].sampling.structured_outputs)
    assert forms[0] == forms[1]


def test_tools_with_a_format_without_calls_are_refused() -> None:
    plain = Api(FakeFrontend(), tool_format="plain")
    assert error_of(plain.chat(tools=TOOLS), 400)["param"] == "tools"
    assert plain.chat(tools=TOOLS, tool_choice="none").status_code == 200


def test_model_whose_template_has_no_tools_is_asked_for_calls() -> None:
    script = say(CALLS.partition("</think>")[2])
    server = Api(FakeFrontend(lambda prompt, index, seed: script, max_model_len=2048))
    history = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "now"}}]},
        {"role": "tool", "tool_call_id": "a", "content": "noon"},
        {"role": "tool", "tool_call_id": "b", "content": "one"},
    ]
    answer = server.chat(messages=history, tools=TOOLS).json()
    calls = answer["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["get", "now"]
    prompt = "".join(message["content"] for message in server.frontend.rendered[-1][0])
    assert '{"name": "get", "description": "d"' in prompt
    assert '<tool_call>\n{"name": "now"' in prompt
    assert "<tool_response>\nnoon\n</tool_response>\n<tool_response>\none" in prompt
    assert server.chat(messages=history, tools=TOOLS, tool_choice="required").status_code == 200
    assert server.frontend.submitted[-1].sampling.structured_outputs is not None
    merged, finish = streamed(server, messages=history, tools=TOOLS)
    assert (len(merged["tool_calls"]), finish) == (2, "tool_calls")


def test_a_required_call_that_is_cut_leaves_no_content() -> None:
    text = CALLS[CALLS.index("<tool_call>") :]
    for length in range(1, 60):
        for stream in (False, True):
            fields = {"tools": TOOLS, "tool_choice": "required", "max_tokens": length}
            if stream:
                message, finish = streamed(api(text), **fields)
            else:
                (choice,) = api(text).chat(**fields).json()["choices"]
                message, finish = choice["message"], choice["finish_reason"]
            assert finish == "length"
            assert not message.get("content"), message
