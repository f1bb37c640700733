"""`Tenants`: what a key may do, what its requests reserve before a model is touched, and what they used."""

from __future__ import annotations

import asyncio
import math

from quire.clock import WallClock
from quire.errors import NotFoundError
from quire.http.refusals import HttpError, Refusal
from quire_gateway.books import Books
from quire_gateway.config import GatewayConfig
from quire_gateway.exchange import Exchange
from quire_gateway.ledger_row import Row
from quire_gateway.limits import LEASE_S, Decision, Limits, LimitTable, MemoryStore, limit_headers
from quire_gateway.quotas import Unit, Usage
from quire_gateway.redis_store import RedisStore
from quire_gateway.rows import price_of, used_of

# Paths that generate no tokens: only the prompt is reserved.
_NO_OUTPUT = (
    "/embeddings",
    "/api/embed",
    "/api/show",
    "/score",
    "/rerank",
    "tokenize",
    "/render",
    "/count_tokens",
    "/input_tokens",
    "/pooling",
    "/classify",
)


class Tenants:
    """Identity and limits of one gateway, and what its requests used. Made in the loop that serves."""

    def __init__(self, config: GatewayConfig, books: Books) -> None:
        self._config = config
        self._books = books
        table = LimitTable(config.limits, config.key_limits, config.tenant_limits, config.model_limits)
        url = config.server.redis
        self._redis = RedisStore(url, WallClock()) if url is not None else None
        self.limits = Limits(table, self._redis or MemoryStore(WallClock()))
        self._renewing = asyncio.create_task(self._renew())

    @property
    def counts_tokens(self) -> bool:
        """Whether every answer must say what it used."""
        config = self._config
        has_limits = any(
            (config.key_limits, config.tenant_limits, config.model_limits)
        ) or config.limits.quotas("")
        return self._books.is_kept or bool(has_limits)

    async def reserve(self, exchange: Exchange, model: str, prompt_tokens: int) -> None:
        """Reserve what a request of its key may use at most. ``model``: empty where it is not known.

        Raises:
            HttpError: 429, a limit is used up; 503, it cannot be booked.
        """
        asked, key = exchange.asked, exchange.call.key
        assert asked is not None
        if key is not None:
            exchange.key, exchange.tenant, exchange.weight = key.name, key.tenant, key.weight
        output = 0 if exchange.path.endswith(_NO_OUTPUT) else asked.num_output_tokens
        exchange.reserved = Usage(
            prompt_tokens, output, price_of(self._config.prices, model).nano(prompt_tokens, 0, output)
        )
        self._books.check()
        reservation, decision = await self.limits.reserve(
            exchange.ledger_id, exchange.key, exchange.tenant, model, exchange.reserved
        )
        if reservation is None:
            raise HttpError(_refusal(decision, exchange.reserved))
        exchange.reservation = reservation
        exchange.extra_headers += limit_headers(decision.left)

    def check_model(self, exchange: Exchange, model: str) -> None:
        """Leave out the targets that the request's key may not use. Raises `NotFoundError` if that is ``model``."""
        key = exchange.call.key
        if key is None:
            return
        if not key.allows_model(model):
            raise NotFoundError(
                f"The key {key.name!r} may not use the model {model!r}; it may use {', '.join(key.models)}.",
                param="model",
                code="model_not_found",
            )
        exchange.targets = [each for each in exchange.targets if key.allows_model(each.model)]

    async def settle(self, exchange: Exchange, now: float) -> None:
        """Replace what the request reserved by what it used, and write its row.

        The row is first: a request that the journal still has as running has not been settled, so the next process can.
        """
        used = used_of(exchange, self._config.prices)
        if exchange.asked is not None:
            self._books.ended(exchange, now, used)
        if exchange.reservation is not None:
            # A refused request has used no tokens, and has been a request.
            most = Usage() if used is None and exchange.outcome == "refused" else used
            await self.limits.settle(exchange.reservation, most)

    async def charge(self, row: Row, limited: str, *, if_held: bool = False) -> None:
        """Charge the budgets for a request of an earlier process (see `Limits.recover`)."""
        price = price_of(self._config.prices, row.model).nano(
            row.prompt_tokens, row.cached_tokens, row.output_tokens
        )
        used, owner = Usage(row.prompt_tokens, row.output_tokens, price), (row.key, row.tenant, limited)
        await self.limits.recover(
            row.request_id, owner, row.finished_at - row.e2el_ms / 1e3, used, if_held=if_held
        )

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            await self.limits.renew()

    async def close(self) -> None:
        """End the leases. The requests have ended."""
        self._renewing.cancel()
        if self._redis is not None:
            await self._redis.close()


def _refusal(decision: Decision, most: Usage) -> Refusal:
    quota = decision.denied
    assert quota is not None
    unit = "money" if quota.unit is Unit.MONEY else str(quota.unit).replace("_", " ")
    allowed = f"{quota.capacity / 1e9:g}" if quota.unit is Unit.MONEY else f"{quota.capacity:,}"
    wanted = f"{most.of(quota.unit) / 1e9:g}" if quota.unit is Unit.MONEY else f"{most.of(quota.unit):,}"
    text = f"The limit {quota.name} allows {allowed} {unit}; the request asks for {wanted}"
    headers = limit_headers(decision.left)
    if math.isinf(decision.retry_after_s):
        return Refusal(
            429,
            f"{text}, which is more than it ever allows.",
            code="request_too_large",
            headers=tuple(headers),
        )
    seconds = max(1, math.ceil(decision.retry_after_s))
    headers.append((b"retry-after", str(seconds).encode()))
    code = "insufficient_quota" if quota.period in ("day", "month") else "rate_limit_exceeded"
    return Refusal(429, f"{text}, and has room for that in {seconds} s.", code=code, headers=tuple(headers))
