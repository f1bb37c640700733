"""`FrontLink`: the server's side of `quire.http.front`, the process that answers probes and accepts connections."""

from __future__ import annotations

import asyncio
import mmap
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from starlette.responses import Response

from quire.http import front
from quire.http.listen import take_connections
from quire.metrics.log import Log

log = Log("server")
Ask = Callable[[], Awaitable[Mapping[str, Response]]]  # the answers to the probes now, by path
TICK_S = 0.1
_STATUS = {200: b"200 OK", 503: b"503 Service Unavailable"}


class FrontLink:
    """Starts the process, tells it the answers ten times a second, and takes the connections that it hands over."""

    def __init__(
        self,
        listen: socket.socket,
        ask: Ask,
        serve: Callable[[socket.socket], None],
        on_end: Callable[[], None],
    ) -> None:
        """``serve`` takes a connection.

        ``on_end`` is called when the process ended by itself: the server then has to accept connections.
        """
        self._ask = ask
        self._serve = serve
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._closed = False
        # Set while the process hands over the last connections.
        self._retired: asyncio.Future[None] | None = None
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        with theirs, tempfile.TemporaryFile() as file:
            file.truncate(front.STATE_BYTES)
            self.state = mmap.mmap(file.fileno(), front.STATE_BYTES)
            self.counter, self.clock = front.state_head(self.state)
            fds = [listen.fileno(), theirs.fileno(), file.fileno()]
            self._popen = subprocess.Popen(
                [sys.executable, "-I", str(Path(front.__file__)), *map(str, fds)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=fds,
                # Linux shares the CPUs out between sessions first (sched_autogroup), so a probe does not wait behind
                # the threads of the engine.
                start_new_session=True,
            )
        self._loop.add_reader(self._control, self._take)
        self._ticking = self._loop.create_task(self._tick())

    @property
    def pid(self) -> int:
        return self._popen.pid

    async def retire(self, keep: Callable[[socket.socket], None]) -> None:
        """Have the process accept no more, and give what it has accepted to ``keep``; it has ended then."""
        if self._closed:
            return
        self._retired = self._loop.create_future()
        self._serve = keep
        self._control.send(b"l")
        await self._retired

    def close(self) -> None:
        """End the process. A second call has no effect."""
        if self._closed:
            return
        self._closed = True
        self._ticking.cancel()
        self._loop.remove_reader(self._control)
        self._control.close()
        try:
            self._popen.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def _take(self) -> None:
        """Take some connections. The end of the process is an empty read."""
        if not take_connections(self._control, 1, front.FDS_AT_ONCE, self._serve):
            self.close()
            if self._retired is not None:
                self._retired.set_result(None)
                return
            log.warning("front_ended", status=self._popen.returncode)
            self._on_end()

    async def _tick(self) -> None:
        while True:
            self.write(await self._ask())
            await asyncio.sleep(TICK_S)

    def write(self, answers: Mapping[str, Response]) -> None:
        self.clock[0] = time.monotonic()
        self.counter[0] += 1
        for i, path in enumerate(front.PATHS):
            raw = raw_answer(answers[path.decode()])
            front.SLOT.pack_into(self.state, front.HEAD_BYTES + i * front.SLOT.size, len(raw), raw)
        self.counter[0] += 1


def raw_answer(answer: Response) -> bytes:
    """Return the bytes of an answer; one that is too long for its slot is left to the server, as an empty one."""
    body = bytes(answer.body)
    raw = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        _STATUS[answer.status_code],
        len(body),
        body,
    )
    return raw if len(raw) <= front.SLOT.size - 2 else b""
