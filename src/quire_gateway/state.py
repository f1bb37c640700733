"""`GatewayState`: what the parts of one gateway share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from starlette.types import Scope

from quire.engine.large_body import LargeBodies
from quire.http.edge import new_id
from quire.metrics.log import Log
from quire_gateway.answer import AnswerStep
from quire_gateway.catalog import Catalog
from quire_gateway.config import GatewayConfig
from quire_gateway.discovery import Discovery
from quire_gateway.fleet import Backend, Fleet
from quire_gateway.health import Poller
from quire_gateway.holders import Holders
from quire_gateway.metrics import GatewayMetrics
from quire_gateway.ownership import Owner, Tenancy
from quire_gateway.placing import Placing
from quire_gateway.retries import RetryBudget
from quire_gateway.routing import Router
from quire_gateway.stage import Pipeline, Stage
from quire_gateway.upstream import BackendFailed, Upstream

if TYPE_CHECKING:  # stages
    from quire_gateway.books import Bookkeeping, Books
    from quire_gateway.filtering import FilterStage
    from quire_gateway.filters import Filters
    from quire_gateway.hedging import Hedging
    from quire_gateway.model_pool import ModelPool
    from quire_gateway.regions import Regions
    from quire_gateway.sealed import Sealed
    from quire_gateway.tenants import Tenants

log = Log("gateway")


@dataclass(slots=True)
class Stages:
    """The stages of one gateway, and those among them that endpoints of their own show."""

    on: list[Stage] = field(default_factory=list)
    bookkeeping: Bookkeeping | None = None
    tenants: Tenants | None = None
    filters: FilterStage | None = None
    hedging: Hedging | None = None
    regions: Regions | None = None
    sealed: Sealed | None = None

    def stored_steps(
        self, scope: Scope, owner: Owner, shown_ids: dict[str, str], hint: str
    ) -> Iterator[AnswerStep]:
        """Yield what the answer to a question about a stored response passes.

        ``shown_ids``: the id that the client named, by the backend's; ``hint``: of the backend, as the id has it.
        """
        if self.sealed is not None and owner.seals:
            yield self.sealed.step(owner, shown_ids, hint)
        if self.filters is not None and (step := self.filters.step(scope)) is not None:
            yield step

    async def budget_left(self, key: str, tenant: str) -> float:
        """Return the smallest share (0…1) that a key and its tenant have left of their budgets; 1 without any."""
        return 1.0 if self.tenants is None else await self.tenants.limits.budget_left(key, tenant)

    def pipeline(self, path: str) -> Pipeline:
        return Pipeline(self.on, path)


@dataclass(slots=True, eq=False)
class GatewayState:
    """The configuration, the backends and the stages. ``upstream`` is there while the application runs."""

    config: GatewayConfig
    router: Router
    fleet: Fleet
    catalog: Catalog
    placing: Placing
    poller: Poller
    discovery: Discovery
    budget: RetryBudget
    holders: Holders
    tenancy: Tenancy
    metrics: GatewayMetrics
    now: Callable[[], float]  # monotonic seconds
    random: Random
    pool: ModelPool | None = None  # of models that are loaded on demand
    stages: Stages = field(default_factory=Stages)
    bodies: LargeBodies = field(default_factory=LargeBodies)
    new_id: Callable[[], str] = new_id
    is_draining: bool = False
    num_open: int = 0
    unix_time: Callable[[], float] = time.time
    _upstream: Upstream | None = None
    _ageing: asyncio.Task[None] | None = None

    @property
    def is_started(self) -> bool:
        return self._upstream is not None

    @property
    def upstream(self) -> Upstream:
        assert self._upstream is not None, "the gateway has not been started"
        return self._upstream

    @property
    def books(self) -> Books:
        assert self.stages.bookkeeping is not None, "there is no ledger"
        return self.stages.bookkeeping.books

    @property
    def tenants(self) -> Tenants | None:
        return self.stages.tenants

    @property
    def filters(self) -> Filters | None:
        return self.stages.filters.filters if self.stages.filters is not None else None

    @property
    def hedging(self) -> Hedging | None:
        return self.stages.hedging

    def start(self) -> None:
        """Start the stages, open the client side and look for backends; called in the loop that serves.

        Raises:
            ConfigError: a stage cannot work: the books cannot be opened.
        """
        for stage in self.stages.on:
            stage.start()
        self._upstream = Upstream(self.config.timeouts.connect_s)
        self.poller.start(self._upstream)
        self.discovery.start()
        if self.router.scores:
            self._ageing = asyncio.create_task(self._age())

    async def close(self) -> None:
        if self._ageing is not None:
            self._ageing.cancel()
        await self.discovery.close()
        await self.poller.close()
        for stage in reversed(self.stages.on):
            await stage.close()
        await self.upstream.close()

    async def _age(self) -> None:
        """Let the routing index forget."""
        while True:
            await asyncio.sleep(self.config.routing.index_ttl_s / self.router.prefixes.ticks_to_live)
            self.router.prefixes.tick()

    def count_failure(self, backend: Backend, error: BackendFailed) -> None:
        """One attempt failed. Without a connection the backend gets no requests until a poll succeeds.

        If the connection timed out, it is not known whether the backend is down: it is silent. One that broke may mean
        that the backend has died: it is polled at once.
        """
        self.metrics.failures[backend.name, error.kind] += 1
        if error.kind == "connect":
            late = error.timed_out
            self.fleet.set_ready(backend, False, str(error), self.now(), is_silent=late, is_lost=not late)
        elif error.kind == "broken":
            self.poller.hurry(backend)
        log.debug("attempt_failed", backend=backend.name, kind=error.kind, error=str(error))

    def key_of(self, backend: Backend) -> str | None:
        """Return the key by which a replica of Quire knows its gateway."""
        server = self.config.server
        is_registered = backend.source == "registered"
        return server.gateway_key or (server.admin_key if is_registered else None)
