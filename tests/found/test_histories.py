"""Histories are never refused for their parts; a part without text in the newest message of the user is."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from tests.api.asgi_client import Api, error_of
from tests.clients.scripted import frontend

from quire.api.conversation import template_messages

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CLAUDE_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
SEEN = "[image: the model is text only and cannot see it]"
DATA = base64.b64encode("naïve text".encode()).decode()
ASK = {"role": "user", "content": "and now?"}


def _prompt(path: str, body: dict[str, Any]) -> str:
    server = Api(frontend())
    answer = server.post(path, {"model": "quill", "max_tokens": 4, **body})
    assert answer.status_code == 200, answer.text
    prompt = server.frontend.submitted[-1].prompt
    return (
        prompt
        if isinstance(prompt, str)
        else server.frontend.tokenizer.decode(prompt, skip_special_tokens=False)
    )


# A part of a message of a chat, its role, and what stands in the prompt.
PARTS: list[tuple[str, dict[str, Any], str]] = [
    ("assistant", {"type": "refusal", "refusal": "no, thanks"}, "no, thanks"),
    ("user", IMAGE, SEEN),
    ("tool", IMAGE, SEEN),
    ("user", {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "[audio: the model"),
    ("user", {"type": "file", "file": {"filename": "a.txt", "file_data": f"data:text/plain;base64,{DATA}"}},
     "a.txt\nnaïve text"),
    ("user", {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AA"}},
     "[file a.pdf: the model"),
    ("assistant", {"type": "something_new", "name": "x", "input": {"a": 1}}, '[something_new: {"name": "x"'),
    ("assistant", {"type": "reasoning", "text": "deep"}, ""),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(PARTS)))
def test_parts_of_a_chat_stand_as_text(case: int) -> None:
    role, part, shown = PARTS[case]
    call = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}
    message: dict[str, Any] = {"role": role, "content": [part]}
    earlier = [
        {"role": "user", "content": "x"},
        *([call, {**message, "tool_call_id": "c"}] if role == "tool" else [message]),
    ]
    assert shown in _prompt("/v1/chat/completions", {"messages": [*earlier, ASK], "tools": TOOLS})


def test_thinking_in_a_content_is_reasoning() -> None:
    from_mistral = {"type": "thinking", "thinking": [{"type": "text", "text": "deep"}]}
    for part in (from_mistral, {"type": "thinking", "thinking": "deep"}):
        message = {"role": "assistant", "content": [part, {"type": "text", "text": "so"}]}
        (read,) = template_messages([message])
        assert (read["content"], read["reasoning_content"]) == ("so", "deep")


CLAUDE_RESULTS: list[tuple[Any, str]] = [
    ([{"type": "text", "text": "a"}, CLAUDE_IMAGE], f"a\n{SEEN}"),
    ([{"type": "tool_reference", "tool_name": "grep"}], "[tool: grep]"),
    ([{"type": "search_result", "title": "T", "source": "http://x", "content": [{"type": "text", "text": "b"}]}],
     "T\nhttp://x\nb"),
    ([{"type": "document", "title": "D", "source": {"type": "text", "media_type": "text/plain", "data": "c"}}],
     "D\nc"),
    ([{"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "d"}]}}], "d"),
    ([{"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA"}}],
     "[document: the model"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CLAUDE_RESULTS)))
def test_results_of_tools_are_never_refused(case: int) -> None:
    """Also in the newest message: the user has not sent them."""
    content, shown = CLAUDE_RESULTS[case]
    messages = [
        {"role": "user", "content": [CLAUDE_IMAGE, {"type": "text", "text": "look"}]},
        {"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
            {"type": "tool_use", "id": "c", "name": "f", "input": {}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": content}]},
    ]  # fmt: skip
    prompt = _prompt("/v1/messages", {"messages": messages, "tools": [{"name": "f", "input_schema": {}}]})
    assert shown in prompt
    assert SEEN + "\nlook" in prompt
    assert '[server_tool_use: {"name": "web_search"' in prompt


def test_items_of_other_servers_stand_as_a_line() -> None:
    items = [
        {
            "role": "user",
            "content": [{"type": "input_image", "image_url": "x"}, {"type": "input_text", "text": "y"}],
        },
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"query": "rain"}},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no, thanks"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "null"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_image", "image_url": "x"}],
        },
        {"type": "message", **ASK},
    ]
    prompt = _prompt("/v1/responses", {"input": items, "max_tokens": None, "store": False})
    for shown in (
        SEEN + "\ny",
        '[web_search_call: {"action": {"query": "rain"}}]',
        "no, thanks",
        f"<tool_response>\n{SEEN}",
    ):
        assert shown in prompt


def test_images_of_earlier_ollama_messages_stand_as_a_line() -> None:
    messages = [
        {"role": "user", "content": "look", "images": ["AA"]},
        {"role": "assistant", "content": "ok"},
        ASK,
    ]
    assert f"look\n{SEEN}" in _prompt(
        "/api/chat", {"messages": messages, "stream": False, "max_tokens": None}
    )


NEWEST: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [ASK, {"role": "user", "content": [IMAGE]}]}, "messages[1].content[0]"),
    ("/v1/messages", {"messages": [ASK, {"role": "user", "content": [CLAUDE_IMAGE]}]}, "messages[1].content[0]"),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}], "max_tokens": None},
     "input[0].content[0]"),
    ("/api/chat", {"messages": [{**ASK, "images": ["AA"]}], "max_tokens": None}, "messages[0].images[0]"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(NEWEST)))
def test_an_image_in_the_newest_message_is_refused_by_place(case: int) -> None:
    path, body, place = NEWEST[case]
    answer = Api(frontend()).post(path, {"model": "quill", "max_tokens": 4, **body})
    assert answer.status_code == 400
    assert place in answer.text
    assert "newest message of the user" in answer.text


def test_a_part_that_is_none_names_message_and_part() -> None:
    error = error_of(
        Api(frontend()).chat(model="quill", messages=[ASK, {"role": "user", "content": ["x"]}]), 400
    )
    assert error["param"] == "messages[1].content[0]"
