"""What the chat page asks for, how it shows that an answer has ended, and what it takes back from a browser."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("nicegui", reason="the extra `cockpit` is not installed")

from quire_lab.cockpit.chat_request import STOPPED, Talk, bar_of, body_of, chunk_event, end_of
from quire_lab.cockpit.conversations import begin_anew, conversation_of, put_back
from quire_lab.cockpit.watched import Failed, _base


def answer(**values: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "Once upon",
        "finish": "length",
        "max_tokens": 8,
        "num_tokens": 8,
    } | values


def test_a_request_has_the_controls_and_the_form() -> None:
    talk = Talk(
        system="Be short.", form="json_schema", form_text='{"type": "object"}', seed=7, is_by_token=True
    )
    body = body_of(talk, "m", [{"role": "user", "content": "Hello"}])
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert (body["seed"], body["logprobs"], body["top_logprobs"]) == (7, True, 20)
    assert isinstance(body["top_k"], int)
    assert "continue_final_message" not in body


def test_to_go_on_is_to_continue_the_last_message() -> None:
    body = body_of(Talk(), "m", [{"role": "user", "content": "Hello"}, answer()], goes_on=True)
    assert body["messages"][-1] == {"role": "assistant", "content": "Once upon"}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)


def test_a_schema_that_is_no_json_is_named() -> None:
    with pytest.raises(Failed, match="The schema: no JSON"):
        body_of(Talk(form="json_schema", form_text="{"), "m", [])


def test_calls_reasoning_and_text_are_told_apart() -> None:
    call = {"index": 0, "function": {"name": "add", "arguments": "{}"}}
    chunk = {"choices": [{"delta": {"reasoning_content": "hm", "content": "x", "tool_calls": [call]}}]}
    event = chunk_event(chunk)
    assert event == {"think": "hm", "text": "x", "calls": [{"index": 0, "name": "add", "arguments": "{}"}]}


def test_the_reason_of_the_end_is_an_event() -> None:
    assert chunk_event({"choices": [{"delta": {}, "finish_reason": "length"}]}) == {"finish": "length"}


@pytest.mark.parametrize(
    ("values", "text", "can_go_on"),
    [
        ({}, "cut at max_tokens = 8", True),
        ({"num_tokens": 5}, "cut: the model's context is full", False),
        ({"content": ""}, "cut at max_tokens = 8, before its text began", False),
        ({"finish": "stop"}, "ended by itself", False),
        ({"finish": STOPPED}, "stopped by you", True),
        ({"finish": "tool_calls"}, "calls tools", False),
        ({"finish": "deadline"}, "deadline", False),
        ({"finish": None}, "failed", False),
    ],
)
def test_an_answer_says_how_it_ended(values: dict[str, Any], text: str, can_go_on: bool) -> None:
    end = end_of(Talk(), answer(**values))
    assert (end["text"], end["can_go_on"]) == (text, can_go_on)


def test_an_answer_in_a_form_cannot_go_on() -> None:
    end = end_of(Talk(form="json_object"), answer())
    assert (end["is_cut"], end["can_go_on"]) == (True, False)


def test_the_bar_adds_up_to_what_was_seen() -> None:
    timing = {"queued_ms": 5.0, "first_token_ms": 25.0, "total_ms": 125.0, "completion_tokens": 11}
    bar = bar_of(timing, 140.0, {})
    assert [bar[part] for part in ("queue", "prefill", "decode", "network")] == [5.0, 20.0, 100.0, 15.0]
    assert ["tokens/s", "100.0"] in bar["facts"]


def test_tokens_that_came_together_give_no_rate() -> None:
    timing = {"first_token_ms": 25.0, "total_ms": 25.02, "completion_tokens": 9}
    assert [name for name, _ in bar_of(timing, 30.0, {})["facts"]] == ["tokens"]


def test_a_conversation_comes_back_as_it_was() -> None:
    talk = Talk(models=["m"], system="Be short.")
    begin_anew(talk)
    talk.turns[0] += [{"role": "user", "content": "Tell me\n a story"}, answer(think="hm")]
    kept = conversation_of(talk)
    assert kept["title"] == "Tell me a story"
    back = Talk()
    assert put_back(back, kept | {"at": 1234})
    assert (back.id, back.models, back.system, back.turns[1]) == (talk.id, ["m"], "Be short.", [])
    assert back.turns[0][1]["finish"] == "length"


@pytest.mark.parametrize(
    "kept",
    [
        None,
        {},
        {"id": "1", "title": "", "turns": [[{"role": "system", "content": "x"}]]},
        {"id": "1", "title": "", "turns": [[], [], []]},
        {"id": 1, "title": "", "turns": [[{"role": "user", "content": ["x"]}]]},
    ],
)
def test_what_is_no_conversation_is_not_taken(kept: Any) -> None:
    talk = Talk(id="own")
    assert not put_back(talk, kept)
    assert talk.id == "own"


def test_a_new_conversation_leaves_a_running_answer_its_list() -> None:
    talk = Talk(id="old")
    turns = talk.turns[0]
    begin_anew(talk)
    turns.append(answer())
    assert talk.turns == [[], []]
    assert talk.id != "old"


def test_the_admin_surface_may_be_a_unix_socket() -> None:
    assert _base("unix:/run/quire.sock") == "unix:/run/quire.sock/"
    assert _base("http://127.0.0.1:8001/") == "http://127.0.0.1:8001"
