"""The walk of a request over real sockets: what passes, what is retried, and what a client sees of a bad backend."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine
from typing import Any

import pytest
from tests.gateway.live import (
    Live,
    Received,
    Script,
    Scripted,
    answer,
    begin_stream,
    chunk,
    frame,
    gateway,
    says,
)

ASK = {"model": "m", "prompt": "hello"}
STREAM = ASK | {"stream": True}


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


def test_a_whole_answer_and_a_stream_pass_unchanged() -> None:
    async def main() -> None:
        backend = Scripted(says("hey"))
        async with gateway(backend) as live:
            status, body = await live.post(ASK)
            assert (status, json.loads(body)["text"]) == (200, "hey")
            status, body = await live.post(STREAM)
            frames = [frame({"id": "c-1", "text": letter}) for letter in "hey"]
            assert status == 200
            assert body.startswith(b"".join(frames))
            assert body.endswith(b"data: [DONE]\n\n")
            assert backend.received[0].raw == json.dumps(ASK).encode()
            assert live.state.metrics.tokens["b0", "m", "output"] == 6

    run(main())


def test_a_name_is_translated_and_the_rest_of_the_body_kept() -> None:
    async def main() -> None:
        backend = Scripted(says("x"))
        raw = b'{"model" : "alias", "prompt":"\\u0041 1.0", "temperature": 1.0, "n":1e0}'
        async with gateway(backend, models=[{"name": "a", "aliases": ["alias"], "split": {"m": 1}}]) as live:
            assert (await live.post(raw))[0] == 200
            assert backend.received[0].raw == (
                b'{"model":"m","prompt":"\\u0041 1.0","temperature":1.0,"n":1e0}'
            )
            status, body = await live.post({"model": "b"})
            assert status == 404
            assert b"did you mean" in body or b"Served: 'a', 'alias', 'm'" in body

    run(main())


def test_hop_by_hop_headers_and_keys_stay_behind() -> None:
    async def main() -> None:
        backend = Scripted(says("x"))
        async with gateway(backend, api_keys=["k1"]) as live:
            assert (await live.post(ASK))[0] == 401
            hops = {"connection": "keep-alive, x-secret", "x-secret": "1", "te": "trailers", "x-kept": "2"}
            assert (await live.post(ASK, authorization="Bearer k1", traceparent="00-1-2-01", **hops))[
                0
            ] == 200
            got = backend.received[0].headers
            assert got["x-kept"] == "2"
            assert got["traceparent"] == "00-1-2-01"
            assert got["x-request-id"] == live.headers["x-request-id"]
            assert not {"x-secret", "te", "authorization"} & set(got)

    run(main())


async def _dies(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def _garbage(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x00\xffgarbage\r\n\r\n")
    writer.close()


async def _half(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"id": "c')
    await writer.drain()
    writer.close()


async def _not_json(request: Received, writer: asyncio.StreamWriter) -> None:
    await answer(writer, 200, b'{"id": "c')


async def _nothing(request: Received, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def _slow_drip(request: Received, writer: asyncio.StreamWriter) -> None:
    await begin_stream(writer)
    for byte in frame({"text": "never whole"}) * 100:
        await chunk(writer, bytes([byte]))
        await asyncio.sleep(0.1)


async def _huge_head(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nx-long: ")
    for _ in range(160):
        writer.write(b"x" * 65536)
        await writer.drain()
    writer.write(b"\r\ncontent-length: 0\r\n\r\n")


async def _many_heads(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n" + b"x-many: 12345678901234567890\r\n" * 300_000 + b"\r\n")
    await writer.drain()


async def _fails(request: Received, writer: asyncio.StreamWriter) -> None:
    await answer(writer, 500, b'{"error": {"message": "no"}}')


BAD = [_dies, _garbage, _half, _not_json, _nothing, _slow_drip, _huge_head, _many_heads, _fails]
SHORT = {"first_token_s": 0.4, "total_s": 0.4, "idle_s": 0.4}


@pytest.mark.parametrize("bad", BAD, ids=lambda script: script.__name__)
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_a_bad_backend_is_retried_at_a_good_one(bad: Script, streams: bool) -> None:
    async def main() -> None:
        wrong, right = Scripted(bad), Scripted(says("ok"))
        async with gateway(wrong, right, timeouts=SHORT, routing={"policy": "round-robin"}) as live:
            for _ in range(2):
                status, body = await live.post(STREAM if streams else ASK)
                assert status == 200
                assert body.endswith(b"[DONE]\n\n") if streams else json.loads(body)["text"] == "ok"
            assert len(wrong.received) >= 1
            assert live.state.metrics.failures.total() >= 1

    run(main())


def test_the_loops_own_lateness_is_not_the_backends() -> None:
    """Limits of the first token, of silence and of a whole answer: the loop stands still for longer than each."""

    async def while_the_loop_stands(request: Received, writer: asyncio.StreamWriter) -> None:
        if not request.body.get("stream"):
            time.sleep(0.6)
            await says("ok")(request, writer)
            return
        await begin_stream(writer)
        for letter in "ab":
            await asyncio.sleep(0.02)
            time.sleep(0.6)
            await chunk(writer, frame({"text": letter}))
        await chunk(writer, b"data: [DONE]\n\n")
        await chunk(writer, b"")

    async def main() -> None:
        backend = Scripted(while_the_loop_stands)
        async with gateway(backend, timeouts=SHORT) as live:
            status, body = await live.post(STREAM)
            assert (status, body.count(b"data:")) == (200, 3), body
            assert (await live.post(ASK))[0] == 200
            assert len(backend.received) == 2

    run(main())


def test_comments_are_no_first_token() -> None:
    async def keeps_alive(request: Received, writer: asyncio.StreamWriter) -> None:
        await begin_stream(writer)
        while True:
            await chunk(writer, b": ping\n\n")
            await asyncio.sleep(0.05)

    async def begins_late(request: Received, writer: asyncio.StreamWriter) -> None:
        await begin_stream(writer)
        await chunk(writer, b": ping\n\n")
        await chunk(writer, b": ping\n\n" + frame({"text": "a"}) + b": ping\n\ndata: [DONE]\n\n")
        await chunk(writer, b"")

    async def main() -> None:
        async with gateway(Scripted(keeps_alive), Scripted(begins_late), timeouts=SHORT,
                           routing={"policy": "round-robin"}) as live:  # fmt: skip
            for _ in range(2):
                status, body = await live.post(STREAM)
                assert (status, body.count(b"data:")) == (200, 2)
            assert live.state.metrics.failures["b0", "timeout"] >= 1

    run(main())


@pytest.mark.parametrize("bad", BAD, ids=lambda script: script.__name__)
def test_a_bad_backend_alone_is_an_error_that_says_so(bad: Script) -> None:
    async def main() -> None:
        async with gateway(Scripted(bad), timeouts=SHORT) as live:
            status, body = await live.post(STREAM)
            assert status in (500, 502, 504)
            assert json.loads(body)["error"]["message"]
            assert live.state.router.loads[0].requests == 0

    run(main())


def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    async def breaks(request: Received, writer: asyncio.StreamWriter) -> None:
        await begin_stream(writer)
        await chunk(writer, frame({"text": "a"}) + b'data: {"text": "ha')
        writer.close()

    async def main() -> None:
        async with gateway(Scripted(breaks)) as live:
            status, body = await live.post(STREAM)
            assert status == 200
            first, second = body.removesuffix(b"\n\n").split(b"\n\n")
            assert first == b'data: {"text": "a"}'
            assert json.loads(second.removeprefix(b"data: "))["error"]["code"] == "backend_broken"
            status, body = await live.post(STREAM | {"messages": []}, "/v1/messages")
            assert body.split(b"\n\n")[1].startswith(b'event: error\ndata: {"type":"error"')
            assert live.state.metrics.requests["/v1/completions", "200", "broken"] == 1

    run(main())


def test_a_client_that_leaves_ends_the_work_of_the_backend() -> None:
    async def endless(request: Received, writer: asyncio.StreamWriter) -> None:
        await begin_stream(writer)
        while True:
            await chunk(writer, frame({"text": "a"}))
            await asyncio.sleep(0.005)

    async def main() -> None:
        backend = Scripted(endless)
        async with gateway(backend) as live:
            async with live.session.post(live.url + "/v1/completions", json=STREAM) as response:
                await response.content.readany()
                response.close()
            await live.until(lambda: backend.num_left == 1)
            await live.until(lambda: live.state.num_open == 0)
            assert live.state.metrics.requests["/v1/completions", "499", "left"] == 1
            assert live.state.router.loads[0].requests == 0

    run(main())


def test_a_slow_reader_slows_the_backend_down() -> None:
    written = 0

    async def floods(request: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await begin_stream(writer)
        for _ in range(2000):
            await chunk(writer, frame({"text": "x" * 16384}))
            written += 16384
        await chunk(writer, b"")

    async def main() -> None:
        async with (
            gateway(Scripted(floods)) as live,
            live.session.post(live.url + "/v1/completions", json=STREAM) as response,
        ):
            before = -1
            while before != written:  # until nothing moves any more
                before = written
                await asyncio.sleep(0.3)
            assert written < 2000 * 16384 / 2
            total = 0
            async for piece in response.content.iter_any():
                total += len(piece)
            assert total == 2000 * len(frame({"text": "x" * 16384}))

    run(main())


def test_a_reader_that_stops_is_cut_off_without_blame() -> None:
    async def floods(request: Received, writer: asyncio.StreamWriter) -> None:
        await begin_stream(writer)
        for _ in range(4000):
            await chunk(writer, frame({"text": "x" * 16384}))

    async def main() -> None:
        async with gateway(Scripted(floods), timeouts=SHORT) as live:
            async with live.session.post(live.url + "/v1/completions", json=STREAM):
                await live.until(lambda: live.state.metrics.requests["/v1/completions", "499", "left"] == 1)
            assert not live.state.metrics.failures

    run(main())


def test_answers_that_are_the_clients_fault_are_not_retried() -> None:
    async def refuses(request: Received, writer: asyncio.StreamWriter) -> None:
        await answer(writer, 400, b'{"error": {"message": "temperature"}}', {"x-detail": "kept"})

    async def main() -> None:
        first, second = Scripted(refuses), Scripted(refuses)
        async with gateway(first, second) as live:
            status, body = await live.post(ASK)
            assert (status, body) == (400, b'{"error": {"message": "temperature"}}')
            assert live.headers["x-detail"] == "kept"
            assert len(first.received) + len(second.received) == 1

    run(main())


def test_retries_stay_within_their_budget() -> None:
    async def main() -> None:
        dead = [Scripted(_fails) for _ in range(3)]
        health = {"max_failures": 10_000, "error_share": 1.0, "panic_share": 1.0}
        retries = {"budget": 0.2, "reserve": 1}
        async with gateway(*dead, health=health, retries=retries) as live:
            for _ in range(50):
                assert (await live.post(ASK))[0] == 500
            attempts = sum(len(each.received) for each in dead)
            assert 55 <= attempts <= 50 + 1 + 10

    run(main())


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 400, "The body is empty"),
        (b"[1]", 400, "must be an object"),
        (b'{"model": 3}', 400, "model = 3"),
        (b'{"model": "m", "stream": "yes"}', 400, "stream = 'yes'"),
        (b'{"model": "m", "max_tokens": -2}', 400, "max_tokens = -2"),
        (b'{"model": "other"}', 404, "Served: 'm'"),
        (b'{"model": "m", "x": "' + b"x" * (1 << 20) + b'"}', 413, "max_body_mib"),
    ],
)
def test_bad_bodies_are_refused_before_any_backend(body: bytes, status: int, said: str) -> None:
    async def main() -> None:
        backend = Scripted(says("x"))
        async with gateway(backend, max_body_mib=1) as live:
            got, text = await live.post(body)
            assert got == status
            assert said in json.loads(text)["error"]["message"]
            assert not backend.received

    run(main())


def test_without_any_backend_the_answer_is_503() -> None:
    async def main() -> None:
        backend = Scripted(says("x"), ready=False)
        async with gateway(backend, ready=False, models=[{"name": "m"}]) as live:
            status, body = await live.post(ASK)
            assert status == 503
            assert "retry-after" in live.headers
            assert json.loads(body)["error"]["code"] == "no_backend"
            async with live.session.get(live.url + "/readyz") as response:
                assert response.status == 503

    run(main())


def test_a_fallback_answers_and_is_named() -> None:
    async def main() -> None:
        large, small = Scripted(_fails, models=("large",)), Scripted(says("s"), models=("small",))
        async with gateway(large, small, models=[{"name": "large", "fallbacks": ["small"]}]) as live:
            status, body = await live.post({"model": "large"})
            assert (status, json.loads(body)["model"]) == (200, "small")
            assert live.headers["x-quire-fallback-model"] == "small"

    run(main())


@pytest.mark.parametrize("when", ["failure", "saturated"])
def test_a_full_backend_falls_back_by_option_only(when: str) -> None:
    async def full(request: Received, writer: asyncio.StreamWriter) -> None:
        await answer(writer, 503, b'{"error": {"code": "queue_full"}}', {"retry-after": "7"})

    async def main() -> None:
        large, small = Scripted(full, models=("large",)), Scripted(says("s"), models=("small",))
        models = [{"name": "large", "fallbacks": ["small"], "fallback_when": when}]
        async with gateway(large, small, models=models) as live:
            status, _ = await live.post({"model": "large"})
            assert status == (200 if when == "saturated" else 503)
            assert when == "saturated" or live.headers["retry-after"] == "7"
            assert live.state.fleet.named("b0").breaker.state(live.state.now()) == "closed"

    run(main())


def test_explain_says_why_a_request_went_where() -> None:
    async def main() -> None:
        one, two = Scripted(says("x")), Scripted(says("x"))
        async with gateway(one, two, routing={"piece_bytes": 64}) as live:
            body = {"model": "m", "prompt": "once upon a time " * 20}
            await live.post(body)
            await live.post(body, x_quire_explain="1")
            why = json.loads(live.headers["x-quire-route"])
            chosen = live.headers["x-quire-backend"]
            assert why["policy"] == "prefix-predicted"
            assert why["backends"][chosen]["prefix"] == why["pieces"] == 5
            assert {len(one.received), len(two.received)} == {0, 2}

    run(main())


def test_draining_by_patch_keeps_new_requests_away() -> None:
    async def main() -> None:
        one, two = Scripted(says("x")), Scripted(says("x"))
        async with gateway(one, two, routing={"policy": "round-robin"}) as live:
            url = live.url + "/admin/backends/b0"
            async with live.session.patch(url, json={"state": "draining"}) as response:
                assert (await response.json())["state"] == "draining"
            for _ in range(4):
                await live.post(ASK)
            assert (len(one.received), len(two.received)) == (0, 4)
            async with live.session.patch(url, json={"state": "gone"}) as response:
                assert response.status == 400
            async with live.session.patch(url, json={"state": "active"}):
                pass
            for _ in range(4):
                await live.post(ASK)
            assert len(one.received) == 2

    run(main())


async def _raw(live: Live, request: bytes) -> bytes:
    host, port = live.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    await writer.drain()
    try:
        return await asyncio.wait_for(reader.read(65536), 10)
    finally:
        writer.close()


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nPOST /x",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}   ",
        HEAD + b"transfer-encoding: xchunked\r\n\r\n{}",
        HEAD + b"x-a: b\r\n\tx-folded\r\n\x00: 1\r\n\r\n",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"x bad: 1\r\ncontent-length: 2\r\n\r\n{}",
    ],
    ids=["both-lengths", "two-lengths", "odd-coding", "nul-in-name", "negative", "space-in-name"],
)
def test_smuggled_requests_are_refused(request_bytes: bytes) -> None:
    async def main() -> None:
        backend = Scripted(says("x"))
        async with gateway(backend) as live:
            assert (await _raw(live, request_bytes)).startswith(b"HTTP/1.1 400")
            assert not backend.received

    run(main())
