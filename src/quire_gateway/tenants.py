"""`Tenants`: what requests reserve of their limits before a model is touched, and what they used."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from quire.clock import WallClock
from quire.http.refusals import HttpError, Refusal
from quire_gateway.config import GatewayConfig
from quire_gateway.exchange import Exchange
from quire_gateway.limits import (
    LEASE_S,
    Decision,
    Limits,
    LimitTable,
    MemoryStore,
    Reservation,
    limit_headers,
)
from quire_gateway.prices import find_price
from quire_gateway.quotas import Unit, Usage
from quire_gateway.stage import Stage
from quire_gateway.used import billed_usage

if TYPE_CHECKING:
    from quire_gateway.ledger_row import Row
    from quire_gateway.redis_store import RedisStore


class Tenants(Stage):
    """The limits of one gateway, and what its requests hold of them."""

    def __init__(self, config: GatewayConfig, redis: RedisStore | None = None) -> None:
        """``redis``: the books of several gateways; None: they are this process's own."""
        self._config = config
        self._redis = redis
        self._limits: Limits | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._reservations: dict[Exchange, Reservation] = {}

    @property
    def limits(self) -> Limits:
        assert self._limits is not None, "the gateway has not been started"
        return self._limits

    def start(self) -> None:
        config = self._config
        table = LimitTable(config.limits, config.key_limits, config.tenant_limits, config.model_limits)
        self._limits = Limits(table, self._redis or MemoryStore(WallClock()))
        self._renewing = asyncio.create_task(self._renew())

    async def close(self) -> None:
        """End the leases."""
        if self._renewing is not None:
            self._renewing.cancel()
        if self._redis is not None:
            await self._redis.close()

    async def admit(self, exchange: Exchange, model: str) -> None:
        """Reserve what a request may use at most.

        Raises:
            HttpError: 429, a limit is used up.
        """
        reservation, decision = await self.limits.reserve(
            exchange.ledger_id, exchange.key, exchange.tenant, model, exchange.reserved
        )
        if reservation is None:
            raise HttpError(_refusal(decision, exchange.reserved))
        self._reservations[exchange] = reservation
        exchange.answer.headers += limit_headers(decision.allowances)

    async def after(self, exchange: Exchange, now: float) -> None:
        """Replace what the request reserved by what it used."""
        reservation = self._reservations.pop(exchange, None)
        if reservation is not None:
            used = billed_usage(exchange, self._config.prices)
            # A refused request has used no tokens, and has been a request.
            most = Usage() if used is None and exchange.outcome == "refused" else used
            await self.limits.settle(reservation, most)

    async def charge(self, row: Row, limited: str, *, if_held: bool = False) -> None:
        """Charge the budgets for a request of an earlier process (see `Limits.recover`)."""
        price = find_price(self._config.prices, row.model).nano(
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


def _refusal(decision: Decision, most: Usage) -> Refusal:
    quota = decision.denied
    assert quota is not None
    unit = "money" if quota.unit is Unit.MONEY else str(quota.unit).replace("_", " ")
    allowed = f"{quota.capacity / 1e9:g}" if quota.unit is Unit.MONEY else f"{quota.capacity:,}"
    wanted = f"{most.of(quota.unit) / 1e9:g}" if quota.unit is Unit.MONEY else f"{most.of(quota.unit):,}"
    text = f"The limit {quota.name} allows {allowed} {unit}; the request asks for {wanted}"
    headers = limit_headers(decision.allowances)
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
