"""`run`: the API under uvicorn, from bind to drain.

bind → listen (livez 200, readyz 503) ─ frontend.start() → ready (readyz 200)
SIGTERM or SIGINT → draining (readyz and new requests 503) → running requests end, or the grace time → exit 0
a second signal → exit at once
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvloop
from starlette.applications import Starlette

from quire.api.health import Probes
from quire.api.state import ApiState
from quire.engine.build import EngineInfo
from quire.engine.frontend import Frontend
from quire.errors import QuireError
from quire.http.drain import DrainingServer, SideApp, served_beside
from quire.http.listen import Tls, bind, url_of
from quire.metrics.log import Log

log = Log("server")
ReadyHook = Callable[[str, EngineInfo], None]  # (base URL, what the engine says of itself)


def run(
    app: Starlette,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    drain_timeout_s: float = 30.0,
    on_ready: ReadyHook | None = None,
    sock: socket.socket | None = None,
    admin: SideApp | None = None,
    tls: Tls | None = None,
) -> int:
    """Serve ``app`` until a signal; return the exit status: 0 after a drain, 1 when the engine could not start.

    ``sock`` is an already bound socket, instead of ``host`` and ``port``. The frontend is started and closed here, in
    the loop that serves. ``admin`` is served beside it, from before the engine is ready until after the drain.
    """
    sock = sock if sock is not None else bind(host, port)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(app, sock, drain_timeout_s, on_ready, admin, tls))


async def _serve(
    app: Starlette,
    sock: socket.socket,
    drain_timeout_s: float,
    on_ready: ReadyHook | None,
    admin: SideApp | None,
    tls: Tls | None,
) -> int:
    state: ApiState = app.state.quire
    frontend = state.frontend

    async def drain() -> None:
        log.info("draining", requests=frontend.num_requests, grace_s=drain_timeout_s)
        await frontend.drain(drain_timeout_s)

    def on_cut(reason: str) -> None:
        state.metrics.counters[f"quire:http_{reason}s"] += 1

    server = DrainingServer(app, drain, on_cut=on_cut, ask=Probes(state).answers, tls=tls)
    starting = asyncio.create_task(_start(server, frontend, url_of(sock, secure=tls is not None), on_ready))
    try:
        async with served_beside(admin):
            await server.serve([sock])
        if not starting.done():
            starting.cancel()
            return 0
        return starting.result()
    except asyncio.CancelledError:
        return 0
    finally:
        state.bodies.close()
        await frontend.close()


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
