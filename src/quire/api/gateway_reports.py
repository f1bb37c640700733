"""`GatewayReports`: the stage of what a gateway is told. It is on with ``--gateway-key``.

what a request has cost, after its end    `quire.api.finished`
where its text ends among cached blocks   `quire.api.piece_blocks`
changes of the cache                      `quire.api.cache_feed`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.types import Scope, Send

from quire.api.cache_feed import CacheFeed
from quire.api.endpoint import CallStage
from quire.api.finished import FinishedUsage, telling_cost
from quire.api.generation import Generation
from quire.api.piece_blocks import telling_blocks
from quire.engine.frontend import Frontend


class GatewayReports(CallStage):
    """The stage of one app."""

    def __init__(self, frontend: Frontend, gateway_key: str | None, unix_time: Callable[[], float]) -> None:
        self.finished = FinishedUsage(gateway_key, unix_time)
        self.cache = CacheFeed(frontend, gateway_key)

    def telling(self, send: Send, scope: Scope, body: Any, generation: Generation) -> Send:
        """Return a `send` that adds to the answer what its gateway asks for; else ``send`` itself."""
        streams = generation.streams
        send = telling_blocks(send, scope, generation.state, body, generation.job, streams)
        return telling_cost(send, generation.call.account, streams.cost)

    def ended(self, path: str, generation: Generation, seconds: float) -> None:
        """Keep what the request has used."""
        model, tokens = generation.job.answer.head.model, generation.usage.counts
        cost = generation.streams.cost()
        self.finished.put(generation.call.account, model, path, tokens, seconds, cost)
