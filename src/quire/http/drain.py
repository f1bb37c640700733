"""uvicorn's server, except that the first signal drains and that a second application can be served beside it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from quire.args import ServerArgs, defaults
from quire.clock import LOOK_S
from quire.http.bounded_websocket import BoundedWebSocket
from quire.http.connections import ConnectionWatch, Patience, WatchedProtocol, watched
from quire.http.front import KEEP_ALIVE_S
from quire.http.front_link import Ask, FrontLink
from quire.http.listen import Tls
from quire.http.memory import EVERY_S, MemoryReturn
from quire.http.moved_connections import Connector, give_idle

# Of a WebSocket. The application's own limit of bodies is lower by default.
MAX_MESSAGE_BYTES = 64 << 20
UVICORN: dict[str, Any] = {
    "http": WatchedProtocol,
    "ws": BoundedWebSocket,
    "ws_max_size": MAX_MESSAGE_BYTES,
    "ws_per_message_deflate": False,
    "log_config": None,
    "access_log": False,
    "server_header": False,
    # Else x-forwarded-for of a client on this machine would be believed.
    "proxy_headers": False,
}
_BACKLOG = 2048
_FORCED_END_S = 1.0
_CLOSE_TIMEOUT_S = 5  # for the last bytes of answers, after the drain
# In which a server has ended that drains as long as it does by default.
STOP_S = defaults(ServerArgs)["drain_timeout_s"] + 2 * _CLOSE_TIMEOUT_S


class DrainingServer(uvicorn.Server):
    """The first signal starts ``drain`` and then ends the server with exit status 0; a second one ends it at once."""

    def __init__(
        self,
        app: ASGIApp,
        drain: Callable[[], Awaitable[None]],
        *,
        on_cut: Callable[[str], None] = lambda reason: None,
        patience: Patience | None = None,
        ask: Ask | None = None,
        tls: Tls | None = None,
    ) -> None:
        """``on_cut``: as of `ConnectionWatch`, which looks after the connections with ``patience``.

        ``ask`` returns the answers to probes, which a process of its own then gives (`quire.http.front`); that one
        reads no TLS, so with ``tls`` this process gives them itself.
        """
        super().__init__(
            uvicorn.Config(
                app,
                **UVICORN,
                lifespan="on",
                backlog=_BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
                ssl_certfile=tls.cert if tls is not None else None,
                ssl_keyfile=tls.key if tls is not None else None,
            )
        )
        self._drain_first = drain
        self._loop = asyncio.get_running_loop()
        self._connections = self.server_state.connections
        self._watch = ConnectionWatch(patience or Patience(), on_cut, self._note_use)
        self._draining: asyncio.Task[None] | None = None
        self._memory = MemoryReturn(lambda work: self._loop.run_in_executor(None, work))
        self._look_until_s = 0.0
        self._num_signals = 0
        self._ask = ask if tls is None else None
        self._front: FrontLink | None = None
        self._listen: socket.socket | None = None
        self.on_listening: Callable[[], None] = lambda: None
        self._next_memory_look: asyncio.TimerHandle | None = None
        self.connect = Connector()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, with the process in front that accepts connections and answers probes."""
        await super().startup(sockets=[])
        self.connect.make_protocol = partial(
            WatchedProtocol, self.config, self.server_state, self.lifespan.state, self._loop
        )
        if not self.should_exit:
            self._look_at_memory()
            self._watch.start(self.server_state)
        for listen in sockets or ():
            self._listen = listen
            listen.listen(_BACKLOG)
            self.accept()
        self.on_listening()

    def accept(self) -> None:
        """Accept connections, also again after `accept_no_more`."""
        assert self._listen is not None
        if self._ask is None:
            self._accept_here()
        else:
            self._front = FrontLink(self._listen, self._ask, self.connect, self._accept_here)

    async def refresh_probes(self) -> None:
        """Have the process in front answer probes with the state of this moment, not with that of its last tick."""
        if self._front is not None and self._ask is not None:
            self._front.write(await self._ask())

    async def accept_no_more(self) -> list[socket.socket]:
        """Leave new connections in the kernel's queue, and return those that no request has come from yet."""
        untouched: list[socket.socket] = []
        if self._front is not None:
            await self._front.retire(untouched.append)
        for server in self.servers:
            server.close()
        self.servers.clear()
        return untouched

    def leave(self, give: Callable[[socket.socket], None], grace_s: float) -> None:
        """Drain, for another server that accepts on the same socket; ``give`` sends it a connection.

        It gets each connection as soon as no request of it is open. With TLS, a connection stays and is closed with its
        next answer. Requests on connections that stay are answered for ``grace_s`` seconds.
        """

        async def go() -> None:
            until_s = self._loop.time() + grace_s
            while self._loop.time() < until_s and (
                self.connect.is_busy
                or give_idle(watched(self._connections), give, is_tls=self.config.ssl is not None)
            ):
                await asyncio.sleep(LOOK_S)
            await self._drain()

        if self._draining is None:
            self._draining = self._loop.create_task(go())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._front is not None:
            self._front.close()
        self._watch.stop()
        if self._next_memory_look is not None:
            self._next_memory_look.cancel()
        await super().shutdown(sockets)
        if self.force_exit:
            # uvicorn would leave the application's end to the loop's, which prints a traceback.
            with suppress(TimeoutError):
                await asyncio.wait_for(self.lifespan.shutdown(), _FORCED_END_S)

    def _accept_here(self) -> None:
        """Accept connections in this process: TLS is read here, or the process in front has ended."""

        async def accept() -> None:
            assert self._listen is not None
            listen, tls = self._listen.dup(), self.config.ssl  # the other one may be handed over
            made = await self._loop.create_server(
                self.connect.make_protocol, sock=listen, ssl=tls, backlog=_BACKLOG
            )
            self.servers.append(made)

        self._accepting = self._loop.create_task(accept())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. uvicorn would raise it again after its shutdown; a drain ends with status 0 instead."""
        self._num_signals += 1
        if self._num_signals == 1:
            self._loop.call_soon_threadsafe(self._begin_drain, sig == signal.SIGINT)
        else:
            self.should_exit = self.force_exit = True

    def _begin_drain(self, is_at_terminal: bool) -> None:
        if is_at_terminal:
            print("stopping when running requests have ended; Ctrl-C again stops at once", file=sys.stderr)
        self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        await self._drain_first()
        self._watch.end_half_sent(watched(self._connections))
        # uvicorn would cancel what still runs; a request whose client is gone ends by itself, without a traceback.
        self._loop.call_later(_CLOSE_TIMEOUT_S - 1, self._abort_connections)
        self.should_exit = True

    def _abort_connections(self) -> None:
        for connection in watched(self._connections):
            connection.transport.abort()

    def _note_use(self) -> None:
        """Look at the memory for as long as an idle connection stays."""
        self._look_until_s = self._loop.time() + KEEP_ALIVE_S
        if self._next_memory_look is None:
            self._look_at_memory()

    def _look_at_memory(self) -> None:
        now_s = self._loop.time()
        self._memory.look(now_s)
        is_over = now_s >= self._look_until_s
        self._next_memory_look = None if is_over else self._loop.call_later(EVERY_S, self._look_at_memory)


@dataclass(frozen=True, slots=True)
class SideApp:
    """An application that is served beside the main one, and its bound socket.

    ``path`` is that of a unix socket, which is removed at the end.
    """

    app: ASGIApp
    sock: socket.socket
    path: str | None = None


@asynccontextmanager
async def served_beside(side: SideApp | None) -> AsyncGenerator[Callable[[], None], None]:
    """Serve ``side`` while the block runs, or until it calls what it gets: then another process has the socket."""
    if side is None:
        yield lambda: None
        return
    server = _SideServer(uvicorn.Config(side.app, **UVICORN, lifespan="off", timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server.serve([side.sock]))
    try:
        yield server.leave
    finally:
        server.should_exit = True
        await serving
        if side.path is not None and not server.has_left:
            with suppress(FileNotFoundError):
                os.unlink(side.path)


class _SideServer(uvicorn.Server):
    """Leaves the signals to the main server."""

    has_left = False  # another process serves on the socket

    def leave(self) -> None:
        self.should_exit = self.has_left = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
