"""`Tenants`: what a key may do, what its requests reserve before a model is touched, and what they used."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

from quire.clock import WallClock
from quire.errors import NotFoundError
from quire.gateway.config import GatewayConfig
from quire.gateway.exchange import Exchange
from quire.gateway.fleet import Backend
from quire.gateway.journal import Journal
from quire.gateway.ledger import Ledger
from quire.gateway.ledger_database import open_database
from quire.gateway.ledger_row import UNSETTLED, Row
from quire.gateway.limits import LEASE_S, Decision, Limits, LimitTable, MemoryStore, limit_headers
from quire.gateway.quotas import Unit, Usage
from quire.gateway.redis_store import RedisStore
from quire.gateway.rows import output_so_far, price_of, row_of, row_of_record, used_of
from quire.http.account import Used
from quire.http.edge import key_of
from quire.http.refusals import HttpError, Refusal

SPOOL_SUFFIX = ".spool"
JOURNAL_SUFFIX = ".journal"
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
        exchange.reserved = Usage(
            prompt_tokens, output, price_of(self._config.prices, model).nano(prompt_tokens, 0, output)
        )
        reservation, decision = await self.limits.reserve(
            exchange.ledger_id, exchange.key, exchange.tenant, model, exchange.reserved
        )
        if reservation is None:
            raise HttpError(_refusal(decision, exchange.reserved))
        exchange.reservation = reservation
        exchange.extra_headers += limit_headers(decision.left)

    async def settle(self, exchange: Exchange, now: float) -> None:
        """Replace what the request reserved by what it used, and write its row.

        The row is first: a request that the journal still has as running has not been settled, so the next process can.
        """
        used = used_of(exchange, self._config.prices)
        if self._ledger is not None and exchange.asked is not None:
            row = row_of(exchange, now, exchange.outcome, used or Usage())
            self._ledger.record(row, self._put(exchange, row))
        if exchange.reservation is not None:
            await self.limits.settle(exchange.reservation, used)

    def begun(self, exchange: Exchange, now: float) -> None:
        """A backend gets the request: from now on it is booked even if this process is killed."""
        if self._journal is not None:
            used = Usage(exchange.reserved.input_tokens)
            exchange.journal_slot = self._put(exchange, row_of(exchange, now, UNSETTLED, used))

    def _put(self, exchange: Exchange, row: Row) -> int | None:
        limited = exchange.targets[0].model if exchange.targets else ""
        return self._journal.put(exchange.journal_slot, row, limited) if self._journal is not None else None

    def relayed(self, exchange: Exchange) -> None:
        """More of the answer has come."""
        if exchange.journal_slot is not None and self._journal is not None:
            self._journal.count(exchange.journal_slot, output_so_far(exchange))

    def found(self) -> dict[str, tuple[int, Row, str]]:
        """Return the requests that ran when an earlier process was killed: slot, row, and model of the limits."""
        found = self._journal.found if self._journal is not None else ()
        return {
            row.request_id: (slot, row, limited) for slot, row, limited in found if row.outcome == UNSETTLED
        }

    async def book_found(self) -> None:
        """Book the rows that an earlier process has not written."""
        for slot, row, limited in self._journal.found if self._journal is not None else ():
            if row.outcome != UNSETTLED:
                self.book_row(row, slot)
                await self.charge(row, limited, if_held=True)

    async def charge(self, row: Row, limited: str, *, if_held: bool = False) -> None:
        """Charge the budgets for a request of an earlier process (see `Limits.recover`)."""
        price = price_of(self._config.prices, row.model).nano(
            row.prompt_tokens, row.cached_tokens, row.output_tokens
        )
        used, owner = Usage(row.prompt_tokens, row.output_tokens, price), (row.key, row.tenant, limited)
        await self.limits.recover(
            row.request_id, owner, row.finished_at - row.e2el_ms / 1e3, used, if_held=if_held
        )

    def forget(self, slot: int | None) -> None:
        """A request of an earlier process needs no row of its own."""
        if slot is not None and self._journal is not None:
            self._journal.free(slot)

    def book_row(self, row: Row, slot: int | None = None) -> None:
        """Write a row at its model's price."""
        if self._ledger is not None:
            price = price_of(self._config.prices, row.model).nano(
                row.prompt_tokens, row.cached_tokens, row.output_tokens
            )
            self._ledger.record(replace(row, price_nano=price), slot)

    def book(self, used: Used, backend: Backend) -> None:
        """Book what a replica knows of a request; a row of its own gateway wins."""
        self.book_row(row_of_record(used, backend))

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
