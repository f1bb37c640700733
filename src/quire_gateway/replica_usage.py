"""What a replica knows of a request that ended without its usage: a stream that broke, or whose client left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from quire.http.account import USAGE_PATH, UsedPage
from quire_gateway.exchange import Exchange
from quire_gateway.fleet import Backend
from quire_gateway.stage import Stage
from quire_gateway.upstream import ASIDE_TIMEOUT_S, BackendFailed, Upstream
from quire_gateway.usage import Usage

ASK_S = (0.02, 0.05, 0.1, 0.2, 0.5)  # pauses before each question for a request that is about to end


class UsageReader:
    """Asks replicas what requests have used. ``key_of``: the key by which a replica knows this gateway."""

    def __init__(self, key_of: Callable[[Backend], str | None], upstream: Callable[[], Upstream]) -> None:
        self._key_of = key_of
        self._upstream = upstream

    def tells(self, backend: Backend) -> bool:
        """Whether a backend is a replica that answers this gateway."""
        return bool(backend.fingerprints) and self._key_of(backend) is not None

    async def page(self, backend: Backend, query: str) -> UsedPage:
        """Raises `BackendFailed`."""
        key = self._key_of(backend)
        assert key is not None
        headers = [("x-quire-gateway-key", key)]
        url = f"{backend.url}{USAGE_PATH}?{query}"
        reply = await self._upstream().get(url, ASIDE_TIMEOUT_S, backend.args.api_key, headers)
        if reply.status != 200:
            raise BackendFailed("status", f"{USAGE_PATH} answered {reply.status}.")
        try:
            return msgspec.json.decode(reply.body, type=UsedPage)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise BackendFailed("garbage", f"{USAGE_PATH} is no list of usage: {error}.") from error


class BrokenUsage(Stage):
    """Gives an exchange that ended without its usage the usage that its replica knows."""

    def __init__(self, reader: UsageReader) -> None:
        self._reader = reader

    async def after(self, exchange: Exchange, now: float) -> None:
        backend, target = exchange.backend, exchange.target
        if backend is None or target is None or exchange.outcome not in ("left", "broken"):
            return
        if target.model not in backend.fingerprints or not self._reader.tells(backend):
            return
        for pause_s in ASK_S:
            await asyncio.sleep(pause_s)
            try:
                page = await self._reader.page(backend, f"id={exchange.ledger_id}")
            except BackendFailed:
                return
            if page.data:
                used = page.data[0]
                tokens = used.prompt_tokens, used.cached_tokens, used.output_tokens
                exchange.usage = Usage(*tokens, None, used.engine_s, used.kv_block_s)
                return
