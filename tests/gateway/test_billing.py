"""What is billed: every answer, by its own count or by its text, and nothing that is no answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.live import Received, Script, Scripted, answer, begin_stream, chunk, frame, gateway, says
from tests.gateway.test_tenants import rows

from quire_gateway.stream_errors import error_in
from quire_gateway.usage import Usage

PRICES = {"m": {"input": 1.0, "output": 2.0}}
STREAM = {"model": "m", "prompt": "hello", "stream": True}


def ask(folder: Path, *scripts: Script, body: dict[str, Any] | None = None, path: str = "/v1/completions",
        **settings: Any) -> tuple[int, bytes, list[int]]:  # fmt: skip
    """Ask a gateway before backends of ``scripts`` once; return status, body, and each breaker's failures."""

    async def main() -> tuple[int, bytes, list[int]]:
        named = {"ledger": str(folder / "ledger.sqlite"), "prices": PRICES, **settings}
        backends = [Scripted(script) for script in scripts]
        async with gateway(*backends, routing={"policy": "round-robin"}, **named) as live:
            status, said = await live.post(body or STREAM, path)
            blamed = [b.breaker.window[2] for b in live.state.fleet]
            return status, said, blamed

    return asyncio.run(asyncio.wait_for(main(), 60))


def bill(line: dict[str, Any]) -> tuple[int, int, int]:
    return line["requests"], line["output_tokens"], line["price_nano"]


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_what_a_backend_refuses_is_not_billed(status: int, tmp_path: Path) -> None:
    async def refuses(request: Received, writer: asyncio.StreamWriter) -> None:
        usage = {"prompt_tokens": 5, "completion_tokens": 2}
        await answer(writer, status, json.dumps({"error": {"message": "no"}, "usage": usage}).encode())

    assert ask(tmp_path, refuses)[0] == status
    found = rows(tmp_path)
    assert set(found) == {"refused", ""}
    assert (bill(found["refused"]), found["refused"]["prompt_tokens"]) == ((1, 0, 0), 0)


def streams(*events: Any, ends: bool = True) -> Script:
    """Stream ``events``, dicts or raw frames; ``ends``: as a stream should, rather than by a closed connection."""

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        await begin_stream(writer)
        for each in events:
            await chunk(writer, each if isinstance(each, bytes) else frame(each))
        if ends:
            await chunk(writer, b"")
        else:
            writer.close()

    return script


def text(value: str, **beside: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "text": value}], **beside}


ERRORS = {
    "openai": frame({"error": {"message": "cuda", "type": "server_error", "code": None}}),
    "text": frame({"error": "cuda"}),
    "anthropic": b"event: error\n"
    + frame({"type": "error", "error": {"type": "api_error", "message": "cuda"}}),
    "responses": b"event: response.failed\n"
    + frame({"type": "response.failed", "response": {"error": {"code": "server_error", "message": "cuda"}}}),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_an_error_in_a_stream_bills_what_the_client_had(error: bytes, tmp_path: Path) -> None:
    script = streams(text("a"), text("b"), text(""), error, b"data: [DONE]\n\n")
    status, said, blamed = ask(tmp_path, script)
    assert (status, said.count(b'"error"') >= 1, said.endswith(b"[DONE]\n\n")) == (200, True, True)
    assert blamed == [1]
    found = rows(tmp_path)
    assert set(found) == {"broken", ""}
    prompt = found["broken"]["prompt_tokens"]
    assert bill(found["broken"]) == (1, 2, prompt * 1000 + 2 * 2000)


def test_the_clients_own_error_does_not_blame_a_backend(tmp_path: Path) -> None:
    error = frame({"error": {"message": "too long", "type": "invalid_request_error", "code": None}})
    assert ask(tmp_path, streams(text("a"), error))[2] == [0]
    assert bill(rows(tmp_path)["broken"])[:2] == (1, 1)


@pytest.mark.parametrize("ends", [True, False])
def test_a_connection_that_ends_after_an_error_adds_none(ends: bool, tmp_path: Path) -> None:
    said = ask(tmp_path, streams(text("a"), ERRORS["openai"], ends=ends))[1]
    assert said.count(b'"error"') == 1
    assert bill(rows(tmp_path)["broken"])[:2] == (1, 1)


def test_a_stream_that_begins_with_an_error_is_retried(tmp_path: Path) -> None:
    status, said, blamed = ask(tmp_path, streams(ERRORS["openai"]), says("ok"))
    assert (status, b"cuda" in said, sorted(blamed)) == (200, False, [0, 1])
    found = rows(tmp_path)
    assert (set(found), bill(found["ok"])[:2]) == ({"ok", ""}, (1, 2))


def test_a_stream_of_an_error_alone_is_not_billed(tmp_path: Path) -> None:
    assert ask(tmp_path, streams(ERRORS["openai"]), retries={"attempts": 1})[0] == 502
    assert bill(rows(tmp_path)["failed"]) == (1, 0, 0)


def test_events_behind_the_last_usage_are_counted(tmp_path: Path) -> None:
    def counted(letter: str, num: int) -> dict[str, Any]:
        return text(letter, usage={"prompt_tokens": 9, "completion_tokens": num})

    # Two tokens in one event, then three events without a count.
    script = streams(counted("a", 1), counted("bc", 3), text("d"), text("e"), text("f"), ends=False)
    ask(tmp_path, script)
    line = rows(tmp_path)["broken"]
    assert (line["prompt_tokens"], line["output_tokens"], line["price_nano"]) == (9, 6, 9 * 1000 + 6 * 2000)


async def _whole_without_usage(request: Received, writer: asyncio.StreamWriter) -> None:
    await answer(writer, 200, json.dumps(text("four" * 10)).encode())


async def _usage_of_another_form(request: Received, writer: asyncio.StreamWriter) -> None:
    await answer(writer, 200, json.dumps(text("four" * 10, usage={"completion_tokens": "ten"})).encode())


@pytest.mark.parametrize("script", [_whole_without_usage, _usage_of_another_form])
def test_an_answer_without_usage_is_billed_by_its_text(script: Script, tmp_path: Path) -> None:
    ask(tmp_path, script, body={"model": "m", "prompt": "hello"})
    line = rows(tmp_path)["ok"]
    assert (line["output_tokens"], line["prompt_tokens"] > 0, line["estimated"]) == (10, True, 1)


def test_a_stream_without_usage_is_billed_by_its_text(tmp_path: Path) -> None:
    ask(tmp_path, streams(*(text(letter) for letter in "abc"), text("a long piece" * 4), b"data: [DONE]\n\n"))
    line = rows(tmp_path)["ok"]
    assert (line["output_tokens"], line["estimated"]) == (13, 1)  # 51 bytes


def test_a_counted_answer_is_no_estimate(tmp_path: Path) -> None:
    ask(tmp_path, says("hello"))
    assert (rows(tmp_path)["ok"]["output_tokens"], rows(tmp_path)["ok"]["estimated"]) == (5, 0)


def test_a_failed_attempts_usage_is_not_the_answers(tmp_path: Path) -> None:
    async def cut(request: Received, writer: asyncio.StreamWriter) -> None:
        await answer(writer, 200, b'{"usage": {"prompt_tokens": 900, "completion_tokens": 100}, "x')

    async def refuses(request: Received, writer: asyncio.StreamWriter) -> None:
        await answer(writer, 400, b"{}")

    ask(tmp_path, cut, refuses, body={"model": "m", "prompt": "hello"})
    assert rows(tmp_path)[""]["prompt_tokens"] == 0


def test_responses_texts_are_counted_once() -> None:
    usage = Usage()
    for value in (
        {"type": "response.output_text.delta", "delta": "ab"},
        {"type": "response.output_text.delta", "delta": 'c"d'},
        {"type": "response.output_text.done", "text": 'abc"d'},
        {"type": "response.completed", "response": {"output": [{"content": [{"text": 'abc"d'}]}]}},
    ):
        usage.read_frames(frame(value), "/v1/responses")
    assert (usage.num_texts, usage.uncounted) == (2, 2)


def test_a_message_starts_without_a_count() -> None:
    usage = Usage()
    start = {
        "type": "message_start",
        "message": {"id": "x", "usage": {"input_tokens": 7, "output_tokens": 1}},
    }
    usage.read_frames(
        frame(start) + frame({"type": "content_block_delta", "delta": {"text": "a"}}), "/v1/messages"
    )
    assert (usage.prompt_tokens, usage.output_tokens, usage.uncounted) == (7, None, 1)
    usage.read_frames(frame({"type": "message_delta", "usage": {"output_tokens": 6}}), "/v1/messages")
    assert (usage.output_tokens, usage.uncounted, usage.is_estimate) == (6, 0, False)


def test_text_about_errors_is_no_error() -> None:
    said = frame(text('{"error": {"message": "x"}}')) + frame({"response": {"error": None}, "error": None})
    assert error_in(said) is None
    assert error_in(b'{"error": "no model"}\n') is not None
