"""`run_gateway`: the gateway under uvicorn, from bind to drain (`quire.http.drain`)."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time

import uvloop

from quire.gateway.app import create_gateway
from quire.gateway.config import GatewayConfig
from quire.gateway.state import GatewayState, make_state
from quire.http.drain import DrainingServer
from quire.http.listen import bind, url_of
from quire.metrics.log import Log

log = Log("gateway")
_LOOK_S = 0.05


def run_gateway(config: GatewayConfig) -> int:
    """Serve until a signal; return the exit status, 0 after a drain.

    Raises:
        ConfigError: the address cannot be used.
    """
    sock = bind(config.server.host, config.server.port)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        state = make_state(config, time.monotonic, secrets.randbits(32))

        async def serve() -> int:
            server = DrainingServer(create_gateway(state), lambda: _drain(state))
            url = url_of(sock)
            print(f"gateway  on {url}, {state.router.policy} over {len(config.backends)} sources of backends",
                  file=sys.stderr, flush=True)  # fmt: skip
            log.info("listening", url=url)
            await server.serve([sock])
            return 0

        return runner.run(serve())


async def _drain(state: GatewayState) -> None:
    """Refuse new requests and wait for the open ones, up to ``drain_timeout_s``."""
    state.is_draining = True
    end_s = state.now() + state.config.server.drain_timeout_s
    log.info("draining", requests=state.num_open, grace_s=state.config.server.drain_timeout_s)
    while state.num_open and state.now() < end_s:
        await asyncio.sleep(_LOOK_S)
