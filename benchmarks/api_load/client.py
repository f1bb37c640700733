"""The load of the load test: raw HTTP/1.1 on open connections, next to no work a chunk, so that it fits on one core."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from typing import cast

import uvloop

MARK = b"\ndata: "
PROBES = 8  # connections whose chunks are read for the delay
USAGE = re.compile(rb'"completion_tokens":(\d+)')


@dataclass(slots=True)
class Tally:
    """What all connections saw while ``counting``."""

    counting: bool = False
    num_chunks: int = 0
    num_answers: int = 0
    num_wrong: int = 0  # answers that were not 200
    arrivals: list[tuple[str, int, float]] = field(default_factory=list)  # (answer id, its n-th token, when)


class Connection(asyncio.Protocol):
    """Sends its request again and again, and counts what comes."""

    def __init__(self, tally: Tally, request: bytes, streams: bool, probe: bool) -> None:
        self._tally = tally
        self._request = request
        self._streams = streams
        self._probe = probe
        self._tail = b""
        self._num_tokens = 0
        self._transport: asyncio.Transport | None = None
        self.last = False  # stop after the answer on its way
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        if self._streams:
            if self._tally.counting:
                self._tally.num_chunks += data.count(MARK)
            if self._probe:
                self._read_ids(data, now_s)
            window = self._tail + data
            if window.endswith(b"0\r\n\r\n"):
                self._next(window)
            else:
                self._tail = data[-8:]
        else:
            self._tail += data
            head, _, body = self._tail.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            if length is not None and len(body) >= int(length[1]):
                if not head.startswith(b"HTTP/1.1 200"):
                    self._tally.num_wrong += 1
                self._next(b"")

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self._tally.num_wrong += 1
            self.done.set_result(None)

    def _read_ids(self, data: bytes, now_s: float) -> None:
        """A probe's chunks come whole: a write each, on a loopback. What does not parse is left out."""
        for line in data.split(b"\n"):
            if line.startswith(b"data: {"):
                try:
                    chunk = json.loads(line[6:])
                except ValueError:
                    continue
                for choice in chunk["choices"]:
                    for _ in choice.get("token_ids") or ():
                        self._num_tokens += 1
                        if self._tally.counting:
                            self._tally.arrivals.append((chunk["id"], self._num_tokens, now_s))

    def _next(self, window: bytes) -> None:
        if self._streams and b"[DONE]" not in window and b"DONE]" not in window:
            self._tally.num_wrong += 1
        if self._tally.counting:
            self._tally.num_answers += 1
        self._tail, self._num_tokens = b"", 0
        assert self._transport is not None
        if self.last:
            self.done.set_result(None)
            self._transport.close()
        else:
            self._transport.write(self._request)


def request_of(host: str, *, streams: bool, num_tokens: int, probe: bool) -> bytes:
    body = {
        "model": "load", "messages": [{"role": "user", "content": "Say something short about the sea."}],
        "max_tokens": num_tokens, "ignore_eos": True, "stream": streams,
    }  # fmt: skip
    if probe:
        body["return_token_ids"] = True
    payload = json.dumps(body).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % (host.encode(), len(payload))
    ) + payload


async def load(
    url: str, *, connections: int, streams: bool, num_tokens: int, warm_s: float, count_s: float
) -> tuple[Tally, float, list[float]]:
    """Return what was counted in ``count_s`` seconds, how long that was, and how late the client's own loop ran."""
    host, _, port = url.removeprefix("http://").partition(":")
    loop, tally = asyncio.get_running_loop(), Tally()
    made = []
    for i in range(connections):
        probe = streams and i < PROBES
        # Answers of different lengths, so that they do not all end, and begin again, in the same step.
        length = num_tokens + (i * 37 % (num_tokens // 2) if streams else 0)
        request = request_of(url.removeprefix("http://"), streams=streams, num_tokens=length, probe=probe)
        _, connection = await loop.create_connection(
            lambda request=request, probe=probe: Connection(tally, request, streams, probe), host, int(port)
        )
        made.append(connection)
    await asyncio.sleep(warm_s)
    tally.counting, begin, late = True, time.monotonic(), []
    while (now := time.monotonic()) < begin + count_s:
        await asyncio.sleep(0.01)
        late.append(time.monotonic() - now - 0.01)
    seconds = time.monotonic() - begin
    tally.counting = False
    for connection in made:
        connection.last = True
    await asyncio.wait([connection.done for connection in made], timeout=60)
    return tally, seconds, late


def run_load(url: str, **settings: object) -> tuple[Tally, float, list[float]]:
    """`load` in a loop of its own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(load(url, **settings))  # type: ignore[arg-type]
