"""Tagged streams in the gateway: what is taken out, kept, and given to the next replica; on scripted replicas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.gateway.live import Received, Script, Scripted, answer, begin_stream, chunk, frame, gateway

from quire_gateway.migrate import MAX_TAG_BYTES, Continuation, Groups, StreamMoves

KEY = "between-us"
STREAM = {"model": "m", "prompt": "hello", "stream": True}


def group(tag: Any, events: bytes) -> bytes:
    return b":%d %b\n%b" % (len(events), json.dumps(tag).encode(), events)


def opened(fingerprint: str = "f") -> Continuation:
    return Continuation("0" * 32, 1, 2, fingerprint)


def test_groups_come_out_whole_however_bytes_are_cut() -> None:
    parts = [group([0, [1], 0], b"data: a\n\n"), group([0, [2], 0], b""), group(0, b"data: b\n\ndata: c\n\n")]
    stream = b"".join(parts)
    for size in range(1, len(stream) + 1):
        continuation = opened()
        groups = Groups(continuation)
        out = b"".join(groups.feed(stream[i : i + size]) for i in range(0, len(stream), size))
        assert out == b"data: a\n\ndata: b\n\ndata: c\n\n"
        assert groups.end() == b""
        form = json.loads(continuation.body(b'{"n": 1}', 0.5))
        assert form["delivered"] == [[0, [1], 0], [0, [2], 0]]
        assert (form["fingerprint"], form["elapsed_s"], form["request"]) == ("f", 0.5, {"n": 1})


@pytest.mark.parametrize("data", [b"data: a\n\n", b":x 0\n", b":-5 0\nabcde", b":1 zero\na"])
def test_a_stream_with_wrong_tags_is_garbage(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"tag|int"):
        Groups(opened()).feed(data)


def test_a_replica_that_shuts_down_gives_its_stream_up() -> None:
    groups = Groups(opened())
    assert groups.feed(group([0, [1], 0], b"data: a\n\n") + group(503, b"data: error\n\n")) == b"data: a\n\n"
    with pytest.raises(StreamMoves):
        groups.end()


def test_tags_beyond_the_limit_end_the_right_to_move() -> None:
    continuation = opened()
    for _ in range(MAX_TAG_BYTES // 1000 + 1):
        continuation.keep(b"[" + b"1" * 999)
    assert not continuation.can_move
    assert len(continuation.body(b"{}", 0.0)) < 100


class Quill(Scripted):
    """A scripted replica of Quire: /v1/models has its fingerprint."""

    def __init__(self, script: Script, fingerprint: str = "f") -> None:
        super().__init__(script)
        self.card = {"fingerprint": fingerprint}


def tells(letters: str, *, dies_after: int | None = None, fingerprint: str = "f") -> Script:
    """Stream ``letters`` from where the request says; close the connection behind ``dies_after`` of them."""

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        assert request.headers["x-quire-gateway-key"] == KEY
        done = len(request.body["delivered"]) if "x-quire-resume" in request.headers else 0
        await begin_stream(writer, {"x-quire-tagged": fingerprint})
        for at in range(done, len(letters)):
            if dies_after is not None and at >= dies_after:
                writer.close()
                return
            name = request.headers["x-quire-answer"]
            await chunk(writer, group([0, [at], 0], frame({"id": name, "text": letters[at]})))
        await chunk(writer, group(0, b"data: [DONE]\n\n"))
        await chunk(writer, b"")

    return script


def said(stream: bytes) -> tuple[str, set[str]]:
    values = [json.loads(line[6:]) for line in stream.split(b"\n\n") if line.startswith(b"data: {")]
    return "".join(value["text"] for value in values), {value["id"] for value in values}


def run(main: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_stream_moves_and_the_client_sees_one() -> None:
    async def main() -> None:
        dying, good = Quill(tells("hello", dies_after=2)), Quill(tells("hello"))
        async with _gateway(dying, good) as live:
            status, stream = await live.post(STREAM)  # round robin begins with the dying one
            assert status == 200
            assert said(stream)[0] == "hello"
            assert len(said(stream)[1]) == 1
            assert stream.endswith(b"data: [DONE]\n\n")
            assert stream.startswith(b"data: ")
            assert "x-quire-tagged" not in live.headers
            assert live.state.metrics.migrations == {("b1",): 1}
            (resumed,) = [each for each in good.received if "x-quire-resume" in each.headers]
            assert resumed.body["request"] == STREAM
            assert resumed.body["delivered"] == [[0, [0], 0], [0, [1], 0]]

    run(main)


def test_a_stream_never_moves_to_another_fingerprint() -> None:
    async def main() -> None:
        dying, other = Quill(tells("hello", dies_after=2)), Quill(tells("hello", fingerprint="g"), "g")
        async with _gateway(dying, other, timeouts={"ready_s": 0.5}) as live:
            _, stream = await live.post(STREAM)
            assert b'"error"' in stream
            assert not [each for each in other.received if "x-quire-resume" in each.headers]
            assert not live.state.metrics.migrations

    run(main)


def test_a_replica_that_refuses_to_resume_ends_the_stream() -> None:
    async def refuses(request: Received, writer: asyncio.StreamWriter) -> None:
        if "x-quire-resume" in request.headers:
            await answer(writer, 400, b'{"error": {"message": "no"}}')
        else:
            await tells("hello", dies_after=2)(request, writer)

    async def main() -> None:
        async with _gateway(Quill(refuses), Quill(refuses), timeouts={"ready_s": 1.0}) as live:
            _, stream = await live.post(STREAM)
            assert stream.count(b'"text"') == 2
            assert b"error" in stream

    run(main)


def _gateway(*replicas: Quill, **settings: Any) -> Any:
    routing = {"policy": "round-robin"}
    return gateway(*replicas, gateway_key=KEY, routing=routing, **settings)
