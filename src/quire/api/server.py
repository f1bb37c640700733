"""`run`: the API under uvicorn, from bind to drain.

bind → listen (livez 200, readyz 503) ─ frontend.start() → ready (readyz 200)
SIGTERM or SIGINT → draining (readyz and new requests 503) → running requests end, or the grace time → exit 0
a second signal → exit at once
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from types import FrameType

import uvicorn
import uvloop
from fastapi import FastAPI

from quire.api.admin_server import AdminListener, admin_server
from quire.api.batch_runner import BatchRunner
from quire.api.listen import UVICORN, bind, url_of
from quire.api.state import ApiState
from quire.engine.build import EngineInfo
from quire.engine.frontend import Frontend
from quire.errors import QuireError
from quire.metrics.log import Log

BACKLOG = 2048
KEEP_ALIVE_S = 75
_CLOSE_TIMEOUT_S = 5  # for the last bytes of answers, after the drain

log = Log("server")
ReadyHook = Callable[[str, EngineInfo], None]  # (base URL, what the engine says of itself)


def run(
    app: FastAPI,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    drain_timeout_s: float = 30.0,
    on_ready: ReadyHook | None = None,
    sock: socket.socket | None = None,
    admin: AdminListener | None = None,
) -> int:
    """Serve ``app`` until a signal; return the exit status: 0 after a drain, 1 when the engine could not start.

    ``sock`` is an already bound socket, instead of ``host`` and ``port``. The frontend is started and closed here, in
    the loop that serves. ``admin`` is served beside it, from before the engine is ready until after the drain.
    """
    sock = sock if sock is not None else bind(host, port)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(app, sock, drain_timeout_s, on_ready, admin))


async def _serve(
    app: FastAPI,
    sock: socket.socket,
    drain_timeout_s: float,
    on_ready: ReadyHook | None,
    admin: AdminListener | None,
) -> int:
    state: ApiState = app.state.quire
    frontend = state.frontend
    config = uvicorn.Config(
        app,
        **UVICORN,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )
    server = DrainingServer(config, frontend, drain_timeout_s)
    batches: BatchRunner | None = app.state.batches
    starting = asyncio.create_task(_start(server, frontend, url_of(sock), on_ready))
    if batches is not None:
        batches.resume()
    try:
        async with _beside(admin):
            await server.serve([sock])
        if not starting.done():
            starting.cancel()
            return 0
        return starting.result()
    except asyncio.CancelledError:
        return 0
    finally:
        if batches is not None:
            await batches.close()
        await frontend.close()


@asynccontextmanager
async def _beside(admin: AdminListener | None) -> AsyncGenerator[None, None]:
    """Serve the admin surface while the block runs."""
    if admin is None:
        yield
        return
    server = admin_server(admin)
    serving = asyncio.create_task(server.serve([admin.sock]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving
        if admin.path is not None:
            with suppress(FileNotFoundError):
                os.unlink(admin.path)


async def _start(server: DrainingServer, frontend: Frontend, url: str, on_ready: ReadyHook | None) -> int:
    try:
        info = await frontend.start()
    except QuireError as error:
        log.error("start_failed", error=str(error))
        server.should_exit = True
        return 1
    log.info("ready", url=url, model=frontend.model.names[0], context=frontend.model.max_model_len)
    if on_ready is not None:
        on_ready(url, info)
    return 0


class DrainingServer(uvicorn.Server):
    """uvicorn's server, except that the first signal drains and the exit status is then 0."""

    def __init__(self, config: uvicorn.Config, frontend: Frontend, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._frontend = frontend
        self._drain_timeout_s = drain_timeout_s
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None
        self._num_signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Signal handler. uvicorn would raise the signal again after its shutdown; a drain ends with status 0."""
        self._num_signals += 1
        if self._num_signals == 1:
            self._loop.call_soon_threadsafe(self._begin_drain)
        else:
            self.should_exit = self.force_exit = True

    def _begin_drain(self) -> None:
        self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        log.info("draining", requests=self._frontend.num_requests, grace_s=self._drain_timeout_s)
        await self._frontend.drain(self._drain_timeout_s)
        self.should_exit = True
