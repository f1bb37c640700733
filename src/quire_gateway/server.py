"""`run_gateway`: the gateway under uvicorn, from bind to drain (`quire.http.drain`)."""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING

import uvloop
from starlette.types import ASGIApp

from quire.clock import LOOK_S
from quire.http.browser_guard import open_note
from quire.http.drain import DrainingServer
from quire.http.extension import Extension
from quire.http.listen import bind, url_of
from quire.metrics.log import Log
from quire_gateway.app import Probes, create_gateway
from quire_gateway.build import make_state
from quire_gateway.config import GatewayConfig
from quire_gateway.state import GatewayState

if TYPE_CHECKING:
    from quire_gateway.model_pool import ModelPool

log = Log("gateway")


# (state, URL, what ends the gateway) → what runs beside it, such as replicas of this machine
Beside = Callable[[GatewayState, str, Callable[[], None]], AbstractAsyncContextManager[None]]


def run_gateway(
    config: GatewayConfig,
    *,
    beside: Beside | None = None,
    extend: Callable[[GatewayState], Extension] = lambda state: Extension(),
    pool: ModelPool | None = None,
) -> int:
    """Serve until a signal; return the exit status, 0 after a drain.

    ``extend`` adds routes, such as batches; ``pool`` has the models that are loaded on demand.

    Raises:
        ConfigError: the address, the books, or what the extension needs, cannot be used.
    """
    with (
        bind(config.server.host, config.server.port) as sock,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        state = make_state(config, time.monotonic, secrets.randbits(32), pool)
        return runner.run(_serve(state, create_gateway(state, extend(state)), sock, beside))


async def _serve(state: GatewayState, app: ASGIApp, sock: socket.socket, beside: Beside | None) -> int:
    state.start()  # here, not by uvicorn, which would print the traceback of what a person is told in one line
    server, url = DrainingServer(app, lambda: _drain(state), ask=Probes(state).answers), url_of(sock)

    def stop() -> None:
        server.should_exit = True

    print(f"gateway  on {url}, {state.router.policy}", file=sys.stderr, flush=True)
    asks = state.config.server
    note = open_note(sock.getsockname()[0], asks.allowed_hosts, has_keys=asks.checks_keys, option="api_keys")
    if note is not None:
        print(note, file=sys.stderr, flush=True)
    log.info("listening", url=url)
    async with beside(state, url, stop) if beside is not None else nullcontext():
        await server.serve([sock])
    return 0


async def _drain(state: GatewayState) -> None:
    """Refuse new requests and wait for the open ones, up to ``drain_timeout_s``."""
    state.is_draining = True
    end_s = state.now() + state.config.server.drain_timeout_s
    log.info("draining", requests=state.num_open, grace_s=state.config.server.drain_timeout_s)
    while state.num_open and state.now() < end_s:
        await asyncio.sleep(LOOK_S)
