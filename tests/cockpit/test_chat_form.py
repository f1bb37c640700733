"""What the chat page asks for, and what it makes of an answer's parts."""

from __future__ import annotations

import pytest

pytest.importorskip("nicegui", reason="the extra `cockpit` is not installed")

from quire.cockpit.chat import Talk, bar_of, body_of, event_of
from quire.cockpit.watched import Failed, _base


def test_a_request_has_the_controls_and_the_form() -> None:
    talk = Talk(
        system="Be short.", form="json_schema", form_text='{"type": "object"}', seed=7, is_by_token=True
    )
    body = body_of(talk, "m", [{"role": "user", "content": "Hello"}])
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert (body["seed"], body["logprobs"], body["top_logprobs"]) == (7, True, 20)
    assert isinstance(body["top_k"], int)


def test_a_schema_that_is_no_json_is_named() -> None:
    with pytest.raises(Failed, match="The schema: no JSON"):
        body_of(Talk(form="json_schema", form_text="{"), "m", [])


def test_calls_reasoning_and_text_are_told_apart() -> None:
    call = {"index": 0, "function": {"name": "add", "arguments": "{}"}}
    chunk = {"choices": [{"delta": {"reasoning_content": "hm", "content": "x", "tool_calls": [call]}}]}
    event = event_of(chunk)
    assert event == {"think": "hm", "text": "x", "calls": [{"index": 0, "name": "add", "arguments": "{}"}]}


def test_the_bar_adds_up_to_what_was_seen() -> None:
    timing = {"queued_ms": 5.0, "first_token_ms": 25.0, "total_ms": 125.0, "completion_tokens": 11}
    bar = bar_of(timing, 140.0, {})
    assert [bar[part] for part in ("queue", "prefill", "decode", "network")] == [5.0, 20.0, 100.0, 15.0]
    assert ["tokens/s", "100.0"] in bar["facts"]


def test_the_admin_surface_may_be_a_unix_socket() -> None:
    assert _base("unix:/run/quire.sock") == "unix:/run/quire.sock/"
    assert _base("http://127.0.0.1:8001/") == "http://127.0.0.1:8001"
