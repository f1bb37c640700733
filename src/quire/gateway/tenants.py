"""`Tenants`: what a key may do, what its requests reserve before a model is touched, and what they used."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from quire.clock import WallClock
from quire.errors import NotFoundError
from quire.gateway.config import GatewayConfig
from quire.gateway.exchange import Exchange
from quire.gateway.ledger import NANO, Ledger, Price, Row, open_database
from quire.gateway.limits import (
    LEASE_S,
    Decision,
    Limits,
    LimitTable,
    MemoryStore,
    Unit,
    Usage,
    limit_headers,
)
from quire.gateway.redis_store import RedisStore
from quire.http.edge import key_of
from quire.http.refusals import HttpError, Refusal

SPOOL_SUFFIX = ".spool"
_FREE = Price()
# Paths that generate no tokens: only the prompt is reserved.
_NO_OUTPUT = (
    "/embeddings",
    "/score",
    "/rerank",
    "tokenize",
    "/render",
    "/count_tokens",
    "/pooling",
    "/classify",
)


class Tenants:
    """Identity, limits and ledger of one gateway. Made in the loop that serves."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        table = LimitTable(config.limits, config.key_limits, config.tenant_limits, config.model_limits)
        url = config.server.redis
        self._redis = RedisStore(url, WallClock()) if url is not None else None
        self._limits = Limits(table, self._redis or MemoryStore(WallClock()))
        self._ledger: Ledger | None = None
        if (ledger := config.server.ledger) is not None:
            spool = Path(config.server.ledger_spool or _beside(ledger))
            self._ledger = Ledger(open_database(ledger), spool)
        self._renewing = asyncio.create_task(self._renew())

    @property
    def counts_tokens(self) -> bool:
        """Whether every answer must say what it used."""
        config = self._config
        has_limits = any(
            (config.key_limits, config.tenant_limits, config.model_limits)
        ) or config.limits.quotas("")
        return self._ledger is not None or bool(has_limits)

    async def reserve(self, exchange: Exchange, model: str, prompt_tokens: int) -> None:
        """Check that the key may use ``model`` and reserve what the request may use at most.

        Raises:
            NotFoundError: the key may not use the model.
            HttpError: 429, a limit is used up.
        """
        asked, key = exchange.asked, key_of(exchange.scope)
        assert asked is not None
        if key is not None:
            exchange.key, exchange.tenant = key.name, key.tenant
            if not key.allows_model(model):
                raise NotFoundError(
                    f"The key {key.name!r} may not use the model {model!r}; "
                    f"it may use {', '.join(key.models)}.",
                    param="model",
                    code="model_not_found",
                )
        output = 0 if exchange.path.endswith(_NO_OUTPUT) else asked.num_output_tokens
        exchange.reserved = Usage(prompt_tokens, output, self._price(model).nano(prompt_tokens, 0, output))
        reservation, decision = await self._limits.reserve(
            exchange.ledger_id, exchange.key, exchange.tenant, model, exchange.reserved
        )
        if reservation is None:
            raise HttpError(_refusal(decision, exchange.reserved))
        exchange.reservation = reservation
        exchange.extra_headers += limit_headers(decision.left)

    @property
    def is_degraded(self) -> bool:
        """Whether Redis does not answer, and the gateway enforces the limits by itself."""
        return self._redis is not None and self._redis.is_degraded

    async def left(self, owners: Iterable[tuple[str, str]], models: Sequence[str]) -> list[dict[str, Any]]:
        """Return what (key, tenant) each have left of their quotas; money in units."""
        found = []
        for each in await self._limits.left(owners, models):
            unit = NANO if each.quota.unit is Unit.MONEY else 1
            found.append(
                {
                    "name": each.quota.name,
                    "unit": str(each.quota.unit),
                    "period": each.quota.period,
                    "capacity": each.quota.capacity / unit,
                    "remaining": each.remaining / unit,
                    "reset_s": round(each.reset_s, 3),
                }
            )
        return found

    async def settle(self, exchange: Exchange, now: float) -> None:
        """Replace what the request reserved by what it used, and write its row."""
        used = self._used(exchange)
        if exchange.reservation is not None:
            await self._limits.settle(exchange.reservation, used)
        if self._ledger is None or exchange.asked is None:
            return
        model = exchange.target.model if exchange.target is not None else exchange.asked.model or ""
        cached = min(exchange.usage.cached_tokens or 0, used.input_tokens) if used is not None else 0
        counted = used or Usage()
        self._ledger.record(
            Row(
                request_id=exchange.ledger_id,
                finished_at=time.time(),
                tenant=exchange.tenant,
                key=exchange.key,
                model=model,
                backend=exchange.backend.name if exchange.backend is not None else "",
                endpoint=exchange.path,
                outcome=exchange.outcome,
                prompt_tokens=counted.input_tokens,
                cached_tokens=cached,
                output_tokens=counted.output_tokens,
                ttft_ms=1e3 * (exchange.first_s - exchange.arrival_s)
                if exchange.first_s is not None
                else 0.0,
                e2el_ms=1e3 * (now - exchange.arrival_s),
                price_nano=counted.money_nano,
            )
        )

    def _used(self, exchange: Exchange) -> Usage | None:
        """Return what a request used; None if no model was touched.

        An answer that ended without its usage, since the stream broke or the client left, is counted by what was
        reserved for its prompt and by the events that came: one token each, as servers stream them.
        """
        usage, reserved = exchange.usage, exchange.reserved
        if usage.prompt_tokens is None and exchange.outcome in ("refused", "failed"):
            return None
        if exchange.backend is None:
            return None
        prompt = reserved.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens
        output = usage.output_tokens
        if output is None or (exchange.outcome in ("broken", "left") and output < exchange.num_frames):
            output = min(exchange.num_frames, reserved.output_tokens)
        assert exchange.target is not None
        price = self._price(exchange.target.model)
        return Usage(prompt, output, price.nano(prompt, min(usage.cached_tokens or 0, prompt), output))

    def _price(self, model: str) -> Price:
        return self._config.prices.get(model, _FREE)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            await self._limits.renew()

    async def close(self) -> None:
        """Write what waits. The requests have ended."""
        self._renewing.cancel()
        if self._redis is not None:
            await self._redis.close()
        if self._ledger is not None:
            await asyncio.to_thread(self._ledger.close)


def _beside(ledger: str) -> str:
    """Return the spool's path for a ledger: beside an SQLite file, in the working folder for a server."""
    is_file = "://" not in ledger or ledger.startswith("sqlite:")
    return (ledger.removeprefix("sqlite://") if is_file else "quire-ledger") + SPOOL_SUFFIX


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
