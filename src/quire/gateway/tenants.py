"""`Tenants`: what a key may do, what its requests reserve before a model is touched, and what they used."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from pathlib import Path

from quire.clock import WallClock
from quire.errors import NotFoundError
from quire.gateway.config import GatewayConfig
from quire.gateway.exchange import Exchange
from quire.gateway.fleet import Backend
from quire.gateway.journal import Journal
from quire.gateway.ledger import RECOVERED, UNSETTLED, Ledger, Price, Row, open_database
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
from quire.http.account import Used
from quire.http.edge import key_of
from quire.http.refusals import HttpError, Refusal

SPOOL_SUFFIX = ".spool"
JOURNAL_SUFFIX = ".journal"
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
        self.limits = Limits(table, self._redis or MemoryStore(WallClock()))
        self._ledger: Ledger | None = None
        self._journal: Journal | None = None
        if (ledger := config.server.ledger) is not None:
            spool = Path(config.server.ledger_spool or _beside(ledger))
            self._journal = Journal(spool.with_suffix(JOURNAL_SUFFIX))
            self._ledger = Ledger(open_database(ledger), spool, self._journal.free)
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
            exchange.key, exchange.tenant, exchange.weight = key.name, key.tenant, key.weight
            if not key.allows_model(model):
                raise NotFoundError(
                    f"The key {key.name!r} may not use the model {model!r}; "
                    f"it may use {', '.join(key.models)}.",
                    param="model",
                    code="model_not_found",
                )
            exchange.targets = [each for each in exchange.targets if key.allows_model(each.model)]
        output = 0 if exchange.path.endswith(_NO_OUTPUT) else asked.num_output_tokens
        exchange.reserved = Usage(prompt_tokens, output, self._price(model).nano(prompt_tokens, 0, output))
        reservation, decision = await self.limits.reserve(
            exchange.ledger_id, exchange.key, exchange.tenant, model, exchange.reserved
        )
        if reservation is None:
            raise HttpError(_refusal(decision, exchange.reserved))
        exchange.reservation = reservation
        exchange.extra_headers += limit_headers(decision.left)

    async def settle(self, exchange: Exchange, now: float) -> None:
        """Replace what the request reserved by what it used, and write its row."""
        used = self._used(exchange)
        if exchange.reservation is not None:
            await self.limits.settle(exchange.reservation, used)
        if self._ledger is not None and exchange.asked is not None:
            row = self._row(exchange, now, exchange.outcome, used or Usage())
            self._ledger.record(row, self._journal.put(exchange.journal_slot, row) if self._journal else None)

    def begun(self, exchange: Exchange, now: float) -> None:
        """A backend gets the request: from now on it is booked even if this process is killed."""
        if self._journal is not None:
            used = Usage(exchange.reserved.input_tokens)
            row = self._row(exchange, now, UNSETTLED, used)
            exchange.journal_slot = self._journal.put(exchange.journal_slot, row)

    def relayed(self, exchange: Exchange) -> None:
        """More of the answer has come."""
        if exchange.journal_slot is not None and self._journal is not None:
            self._journal.count(exchange.journal_slot, exchange.num_frames)

    def _row(self, exchange: Exchange, now: float, outcome: str, used: Usage) -> Row:
        target, asked, backend = exchange.target, exchange.asked, exchange.backend
        begin_s, first_s = exchange.arrival_s, exchange.first_s
        return Row(
            request_id=exchange.ledger_id,
            finished_at=time.time(),
            tenant=exchange.tenant,
            key=exchange.key,
            model=target.model if target is not None else (asked and asked.model) or "",
            backend=backend.name if backend is not None else "",
            endpoint=exchange.path,
            outcome=outcome,
            prompt_tokens=used.input_tokens,
            cached_tokens=min(exchange.usage.cached_tokens or 0, used.input_tokens),
            output_tokens=used.output_tokens,
            ttft_ms=1e3 * (first_s - begin_s) if first_s is not None else 0.0,
            e2el_ms=1e3 * (now - begin_s),
            price_nano=used.money_nano,
        )

    def found(self) -> dict[str, tuple[int, Row]]:
        """Book the rows that an earlier process has not written; return the requests that ran when it was killed."""
        running = {}
        for slot, row in self._journal.found if self._journal is not None else ():
            if row.outcome == UNSETTLED:
                running[row.request_id] = slot, row
            else:
                self.book_row(row, slot)
        return running

    def forget(self, slot: int | None) -> None:
        """A request of an earlier process needs no row of its own."""
        if slot is not None and self._journal is not None:
            self._journal.free(slot)

    def book_row(self, row: Row, slot: int | None = None) -> None:
        """Write a row at its model's price."""
        if self._ledger is not None:
            price = self._price(row.model).nano(row.prompt_tokens, row.cached_tokens, row.output_tokens)
            self._ledger.record(replace(row, price_nano=price), slot)

    def book(self, used: Used, backend: Backend) -> None:
        """Book what a replica knows of a request; a row of its own gateway wins."""
        row = Row(
            request_id=used.request_id,
            finished_at=used.finished_at,
            tenant=used.tenant,
            key=used.key,
            model=used.model,
            backend=backend.name,
            endpoint=used.endpoint,
            outcome=RECOVERED,
            prompt_tokens=used.prompt_tokens,
            cached_tokens=used.cached_tokens,
            output_tokens=used.output_tokens,
            ttft_ms=0.0,
            e2el_ms=used.e2el_ms,
            price_nano=0,
        )
        self.book_row(row)

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
        is_broken = exchange.outcome in ("broken", "left") and not exchange.is_settled
        if output is None or (is_broken and output < exchange.num_frames):
            output = min(exchange.num_frames, reserved.output_tokens)
        assert exchange.target is not None
        price = self._price(exchange.target.model)
        return Usage(prompt, output, price.nano(prompt, min(usage.cached_tokens or 0, prompt), output))

    def _price(self, model: str) -> Price:
        return self._config.prices.get(model, _FREE)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            await self.limits.renew()

    async def close(self) -> None:
        """Write what waits. The requests have ended."""
        self._renewing.cancel()
        if self._redis is not None:
            await self._redis.close()
        if self._ledger is not None:
            await asyncio.to_thread(self._ledger.close)
        if self._journal is not None:
            self._journal.close()


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
