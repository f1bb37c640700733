"""Streams of llama.cpp's ``/completion`` and TGI's ``/generate_stream``: begun again elsewhere, and filtered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.gateway.live import Received, Script, Scripted, answer, begin_stream, chunk, frame, gateway
from tests.gateway.test_proxy import run

from quire_gateway.filter_config import FilterArgs, FilterConfig
from quire_gateway.filter_kinds import make_filters
from quire_gateway.filtering import Filtering
from quire_gateway.filters import About
from quire_gateway.stream_errors import error_in

LLAMA, TGI = "/completion", "/generate_stream"
BODIES = {
    LLAMA: {"model": "m", "prompt": "hi", "stream": True},
    TGI: {"model": "m", "inputs": "hi"},
}


def tgi(text: str, token_id: int = 9, whole: str | None = None, num_tokens: int = 0, **more: Any) -> bytes:
    details = {"finish_reason": "length", "generated_tokens": num_tokens, "seed": None} if whole else None
    token = {"id": token_id, "text": text, "logprob": -0.5, "special": False}
    return frame({"index": 1, "token": token, "generated_text": whole, "details": details, **more})


def llama(text: str, token_id: int = 9, *, stop: bool = False, **more: Any) -> bytes:
    counts = {"tokens_predicted": 3, "tokens_evaluated": 5, "tokens_cached": 0} if stop else {}
    return frame({"content": text, "tokens": [token_id], "stop": stop, **counts, **more})


STREAMS = {
    LLAMA: [llama("a good "), llama("answer"), llama("", stop=True)],
    TGI: [tgi("a good "), tgi("ans"), tgi("wer", whole="a good answer", num_tokens=3)],
}
ERRORS = {
    LLAMA: [
        frame({"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}),
        b'error: {"code":500,"message":"context shift failed","type":"server_error"}\n\n',
    ],
    TGI: [
        frame({"error": "Model is overloaded", "error_type": "overloaded"}),
        frame({"error": "CUDA out of memory", "error_type": "generation"}),
    ],
}


def streamed(*events: bytes, ends: bool = True) -> Script:
    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        await begin_stream(writer)
        for event in events:
            await chunk(writer, event)
        if ends:
            await chunk(writer, b"")
        else:
            writer.close()

    return script


async def dies(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def is_full(request: Received, writer: asyncio.StreamWriter) -> None:
    await answer(writer, 503, b'{"error":"full","error_type":"overloaded"}')


BAD: dict[str, Callable[[str], Script]] = {
    "dies": lambda path: dies,
    "full": lambda path: is_full,
    "empty": lambda path: streamed(),
    "cut in its first event": lambda path: streamed(STREAMS[path][0][:30], ends=False),
    "comments alone": lambda path: streamed(b": ping\n\n", ends=False),
    "an error at once": lambda path: streamed(ERRORS[path][0]),
    "another error at once": lambda path: streamed(ERRORS[path][1]),
}


@pytest.mark.parametrize("how", BAD)
@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_without_a_byte_begins_again_elsewhere(path: str, how: str) -> None:
    """The client has the bytes of the other backend alone, filtered once, and is billed for these."""

    async def main() -> None:
        wrong, right = Scripted(BAD[how](path)), Scripted(streamed(*STREAMS[path]))
        filters: dict[str, Any] = {"filters": [{"name": "f", "keywords": ["bomb"]}]}
        for settings in ({}, filters):
            async with gateway(
                wrong, right, routing={"policy": "round-robin"}, retries={"reserve": 10}, **settings
            ) as live:
                for _ in range(2):  # one of them came to the wrong one first
                    status, body = await live.post(BODIES[path], path)
                    assert (status, body) == (200, b"".join(STREAMS[path])), how
                assert len(wrong.received) >= 1
                assert live.state.metrics.tokens["b1", "m", "output"] == 2 * 3
                assert live.state.metrics.tokens["b0", "m", "output"] == 0
                wrong.received.clear()

    run(main())


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_breaks_later_ends_with_an_error_in_its_form(path: str) -> None:
    async def main() -> None:
        async with gateway(Scripted(streamed(*STREAMS[path][:2], ends=False))) as live:
            status, body = await live.post(BODIES[path], path)
            assert (status, body.startswith(b"".join(STREAMS[path][:2]))) == (200, True)
            error = error_in(body)
            assert error is not None
            assert "backend_broken" in error.names
            assert live.state.metrics.requests[path, "200", "broken"] == 1

    run(main())


@pytest.mark.parametrize("path", STREAMS)
def test_an_error_later_in_a_stream_breaks_it(path: str) -> None:
    async def main() -> None:
        for error in ERRORS[path]:
            async with gateway(Scripted(streamed(*STREAMS[path][:2], error))) as live:
                status, body = await live.post(BODIES[path], path)
                assert (status, body) == (200, b"".join([*STREAMS[path][:2], error]))
                assert live.state.metrics.requests[path, "200", "broken"] == 1

    run(main())


def test_errors_of_other_servers_say_whose_they_are() -> None:
    named = {
        "validation": "is_clients",
        "overloaded": "tells_of_load",
        "exceed_context_size_error": "is_clients",
        "unavailable_error": "tells_of_load",
    }
    for name, whose in named.items():
        for event in (
            frame({"error": "no", "error_type": name}),
            frame({"error": {"message": "no", "type": name}}),
            b'error: {"message":"no","type":"%b"}\n\n' % name.encode(),
        ):
            found = error_in(event)
            assert found is not None
            assert getattr(found, whose), event
            assert found.message == "'no'"


async def filtered(path: str, frames: list[bytes]) -> list[dict[str, Any]]:
    given = FilterArgs(name="f", keywords=("secret",), action="redact")
    filters = make_filters([FilterConfig(given)], lambda: None)  # type: ignore[arg-type,return-value]
    assert filters is not None
    filtering = Filtering(filters, About("r", path, "m", "", ""))
    out = b"".join([await filtering.events(each) for each in frames]) + await filtering.ended(b"")
    return [json.loads(event[6:]) for event in out.split(b"\n\n") if event]


EVENT: dict[str, Callable[..., bytes]] = {LLAMA: llama, TGI: tgi}


def ids_of(event: dict[str, Any]) -> list[int]:
    found = event["tokens"] if "tokens" in event else [event["token"]["id"]]
    return [each for each in found if each]


@pytest.mark.parametrize("path", EVENT)
def test_ids_without_text_go_with_the_text_around_them(path: str) -> None:
    """A character of two tokens, and a piece of several, have events with an id and no text."""
    event = EVENT[path]
    texts = ["All is well. ", "", "the ", "", "", "secret", "", " word. ", "", "And on. ", "", "Bye."]
    frames = [event(text, 100 + i) for i, text in enumerate(texts)]
    frames += [
        event("", 200, stop=True)
        if path == LLAMA
        else event("", 200, "".join(texts), num_tokens=len(frames) + 1)
    ]

    async def main() -> None:
        events = await filtered(path, frames)
        assert len(events) == len(frames), "each event stays, and in its order"
        kept = {each for one in events for each in ids_of(one)}
        changed = set(range(101, 109))  # of the sentence with the word, and at its edges
        assert not kept & changed
        assert kept >= {100, 109, 110, 111, 200}
        shown = "".join(one.get("content", one.get("token", {}).get("text", "")) for one in events)
        assert "secret" not in shown
        assert shown.startswith("All is well. ")
        assert shown.endswith("And on. Bye.")

    run(main())


@pytest.mark.parametrize("path", EVENT)
def test_alternatives_of_a_changed_text_are_dropped(path: str) -> None:
    name = "completion_probabilities" if path == LLAMA else "top_tokens"
    frames = [EVENT[path]("a secret. ", 7, **{name: [{"id": 7, "text": "secret"}]}), EVENT[path]("b. ", 8)]

    async def main() -> None:
        events = await filtered(path, frames)
        assert events[0][name] == []
        assert "secret" not in json.dumps(events)
        assert ids_of(events[1]) == [8]

    run(main())


@pytest.mark.parametrize("path", EVENT)
def test_what_no_filter_changes_keeps_its_bytes_and_ids(path: str) -> None:
    event = EVENT[path]
    frames = [event("", 1), event("one ", 2), event("", 3), event("two. ", 4), event("", 5)]
    given = FilterArgs(name="f", keywords=("secret",), action="redact")
    filters = make_filters([FilterConfig(given)], lambda: None)  # type: ignore[arg-type,return-value]
    assert filters is not None

    async def main() -> None:
        filtering = Filtering(filters, About("r", path, "m", "", ""))
        parts = [await filtering.events(each) for each in frames] + [await filtering.ended(b"")]
        assert b"".join(parts) == b"".join(frames)
        assert parts[3] == b"".join(frames[:4]), (
            "what is behind a text is held until the next one, or the end"
        )

    run(main())
