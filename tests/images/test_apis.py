"""Images in the forms of every API: the same prompt, and refusals by the name of the field."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("PIL", reason="the extra `images` is not installed")

import anthropic
import openai
from tests.e2e.live import LiveServer
from tests.images.tiny_vlm import make_image, make_model

from quire.images.limits import LIMITS


def png(seed: int) -> str:
    """Return an image in base64."""
    buffer = io.BytesIO()
    make_image(40, 30, seed).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


CAT, DOG = png(1), png(2)
URL = f"data:image/png;base64,{CAT}"
ASKED = "What is this?"
CHAT = [
    {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": ASKED}],
    }
]
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": CAT}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tmp_path_factory.mktemp("vlm")
    make_model(folder)
    command = ["-m", "quire.cli", "serve", str(folder), "--port", "0", "--served-model-name", "tiny",
               "--num-kv-blocks", "160", "--threads", "1", "--dtype", "float32"]  # fmt: skip
    with LiveServer(command, folder / "log") as live:
        yield live
        assert live.stop() == 0, live.log.read_text()


def post(server: LiveServer, path: str, **body: Any) -> Any:
    answer = httpx.post(server.url + path, json={"model": "tiny", **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def prompt(server: LiveServer) -> list[int]:
    """The ids of the conversation in OpenAI's form."""
    ids: list[int] = post(server, "/tokenize", messages=CHAT)["tokens"]
    return ids


def test_messages_of_anthropic(server: LiveServer, prompt: list[int]) -> None:
    messages: Any = [{"role": "user", "content": [BLOCK, {"type": "text", "text": ASKED}]}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        counted = client.messages.count_tokens(model="tiny", messages=messages)
        answer = client.messages.create(model="tiny", messages=messages, max_tokens=4)
    assert counted.input_tokens == len(prompt)
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == len(prompt)


def test_responses_keep_their_images(server: LiveServer, prompt: list[int]) -> None:
    asked: Any = [
        {
            "role": "user",
            "content": [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": ASKED}],
        }
    ]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        first = client.responses.create(model="tiny", input=asked, max_output_tokens=4)
        second = client.responses.create(
            model="tiny", input="Sure?", previous_response_id=first.id, max_output_tokens=4
        )
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.input_tokens == len(prompt)
    assert second.usage.input_tokens > len(prompt)
    assert second.usage.input_tokens_details.cached_tokens > len(prompt) // 2
    assert post(server, "/v1/responses/input_tokens", input=asked)["input_tokens"] == len(prompt)


def test_images_of_ollama(server: LiveServer, prompt: list[int]) -> None:
    fields: Any = {"options": {"num_predict": 4}, "stream": False}
    chat = post(server, "/api/chat", messages=[{"role": "user", "content": ASKED, "images": [CAT]}], **fields)
    assert chat["prompt_eval_count"] == len(prompt)
    fields |= {"prompt": ASKED, "images": [CAT]}
    assert post(server, "/api/generate", **fields)["context"][: len(prompt)] == prompt
    hello = post(server, "/tokenize", prompt="<|im_start|>Hello")["tokens"]
    later = post(server, "/api/generate", context=hello, **fields)["context"]
    assert later[: len(hello) + len(prompt) - 1] == hello + prompt[1:]


def test_context_with_places_of_images_is_refused(server: LiveServer, prompt: list[int]) -> None:
    """The images of its ids are not there any more."""
    body = {"model": "tiny", "prompt": "And now?", "context": prompt}
    answer = httpx.post(server.url + "/api/generate", json=body, timeout=60)
    assert answer.status_code == 400
    assert "context" in answer.json()["error"]


def test_results_of_tools_show_images(server: LiveServer) -> None:
    """In the forms of three APIs, with the same tokens."""
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "text", "text": "Seen"}, BLOCK],
    }
    messages = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [result]},
    ]
    items = [
        {"role": "user", "content": ASKED},
        {"type": "function_call", "call_id": "toolu_1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "toolu_1", "output": [
            {"type": "input_text", "text": "Seen"}, {"type": "input_image", "image_url": URL},
        ]},
    ]  # fmt: skip
    chat = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "toolu_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": [
            {"type": "text", "text": "Seen"}, {"type": "image_url", "image_url": {"url": URL}}]},
    ]  # fmt: skip
    counts = {
        post(server, "/v1/messages/count_tokens", messages=messages)["input_tokens"],
        post(server, "/v1/responses/input_tokens", input=items)["input_tokens"],
        post(server, "/tokenize", messages=chat)["count"],
    }
    assert len(counts) == 1
    shown = post(server, "/v1/messages", max_tokens=1, messages=messages)
    result["content"] = [{"type": "text", "text": "Seen"}]
    blind = post(server, "/v1/messages", max_tokens=1, messages=messages)
    image = post(server, "/tokenize", messages=CHAT)["count"]
    image -= post(server, "/tokenize", messages=[{"role": "user", "content": ASKED}])["count"]
    assert shown["usage"]["input_tokens"] - blind["usage"]["input_tokens"] >= image - 1


REFUSED = {
    "anthropic's data": ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "§"}}]}]},
        "messages[0].content[0].source.data"),
    "anthropic's type": ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "base64", "media_type": "text/html", "data": CAT}}]}]},
        "messages[0].content[0].source.media_type"),
    "anthropic's url": ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "url", "url": "https://example.com/cat.png"}}]}]},
        "messages[0].content[0].source.url"),
    "of the assistant": ("/v1/responses", {"input": [{"role": "assistant", "content": [
        {"type": "input_image", "image_url": URL}]}]}, "input[0].content[0]"),
    "of responses": ("/v1/responses", {"input": [{"role": "user", "content": [
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}]}, "input[0].content[0].image_url"),
    "of a tool": ("/v1/messages", {"max_tokens": 4, "messages": [
        {"role": "user", "content": "Look"}, {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}]}]}]},
        "messages[2].content[0].content[0].source.data"),
    "ollama's": ("/api/chat", {"messages": [{"role": "user", "content": "Hi", "images": [CAT, "AAAA"]}]},
        "messages[0].images[1]"),
    "too many": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": URL}}] * (LIMITS.max_images + 1)}]},
        f"messages[0].content[{LIMITS.max_images}].image_url.url"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_refusal_names_path_of_image(server: LiveServer, name: str) -> None:
    path, body, place = REFUSED[name]
    answer = httpx.post(server.url + path, json={"model": "tiny", **body}, timeout=60)
    assert answer.status_code == 400, answer.text
    assert f"{place}: this image cannot be used" in answer.text
