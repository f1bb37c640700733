"""Answers that a backend compresses though nobody asked for it."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable

import pytest
from tests.gateway.live import Received, Scripted, answer, begin_stream, chunk, frame, gateway
from tests.gateway.test_proxy import ASK, STREAM, run

WHOLE = json.dumps(
    {"id": "c-1", "text": "ok", "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
).encode()


def _raw_deflate(data: bytes) -> bytes:
    return zlib.compress(data)[2:-4]


CODINGS = {"gzip": gzip.compress, "deflate": zlib.compress, "DEFLATE": _raw_deflate}


@pytest.mark.parametrize("name", CODINGS)
def test_a_coded_answer_is_read_and_sent_plain(name: str) -> None:
    async def coded(request: Received, writer: asyncio.StreamWriter) -> None:
        assert request.headers["accept-encoding"] == "identity"
        await answer(writer, 200, CODINGS[name](WHOLE), {"content-encoding": name})

    async def main() -> None:
        async with gateway(Scripted(coded)) as live:
            status, body = await live.post(ASK)
            assert (status, body) == (200, WHOLE)
            assert "content-encoding" not in live.headers
            assert live.state.metrics.tokens["b0", "m", "output"] == 2

    run(main())


def test_a_coded_stream_is_relayed_event_by_event() -> None:
    async def coded(request: Received, writer: asyncio.StreamWriter) -> None:
        packer = zlib.compressobj(wbits=31)
        await begin_stream(writer, {"content-encoding": "gzip"})
        for letter in "abc":
            await chunk(writer, packer.compress(frame({"text": letter})) + packer.flush(zlib.Z_SYNC_FLUSH))
        await chunk(writer, packer.compress(b"data: [DONE]\n\n") + packer.flush())
        await chunk(writer, b"")

    async def main() -> None:
        async with gateway(Scripted(coded)) as live:
            status, body = await live.post(STREAM)
            assert (status, body) == (
                200,
                b"".join(frame({"text": letter}) for letter in "abc") + b"data: [DONE]\n\n",
            )

    run(main())


def _bomb(data: bytes) -> bytes:
    return gzip.compress(b'{"text": "' + b"x" * (8 << 20) + b'"}')


@pytest.mark.parametrize(
    ("coding", "make", "said"),
    [
        ("gzip", _bomb, "max_answer_mib"),
        ("compress", lambda data: data, "content-encoding 'compress'"),
        ("gzip, gzip", lambda data: gzip.compress(gzip.compress(data)), "content-encoding 'gzip, gzip'"),
        ("gzip", lambda data: data, "content-encoding: gzip"),
    ],
)
def test_what_cannot_be_decoded_is_an_error(coding: str, make: Callable[[bytes], bytes], said: str) -> None:
    async def coded(request: Received, writer: asyncio.StreamWriter) -> None:
        await answer(writer, 200, make(WHOLE), {"content-encoding": coding})

    async def main() -> None:
        async with gateway(Scripted(coded), max_answer_mib=1) as live:
            status, body = await live.post(ASK)
            assert status == 502
            assert said in json.loads(body)["error"]["message"]

    run(main())
