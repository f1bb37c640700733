"""An ASGI application on uvicorn in this event loop, at a port of 127.0.0.1."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

from quire.http.drain import UVICORN

_POLL_S = 0.002


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncGenerator[str, None]:
    """Serve an application while the block runs; give its URL.

    uvicorn's own loop and shutdown sleep for 0.1 s several times, which a test that serves once would wait for.
    """
    # asyncio sets TCP_NODELAY on connections whose protocol is named. Without it each answer on a kept connection
    # takes 40 ms: Nagle's algorithm holds the body until the client acknowledges the head.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, **UVICORN, lifespan="on")
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.on_tick(0)  # makes the headers of every answer
    await server.startup(sockets=[sock])
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        await _end(server)


async def _end(server: uvicorn.Server) -> None:
    for listening in server.servers:
        listening.close()
    for connection in list(server.server_state.connections):
        connection.shutdown()
    while server.server_state.connections or server.server_state.tasks:
        await asyncio.sleep(_POLL_S)
    await server.lifespan.shutdown()
