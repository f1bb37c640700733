"""`GatewayState`: what the parts of one gateway share."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from quire.engine.large_body import LargeBodies
from quire.errors import RequestError
from quire.http.edge import new_id
from quire.http.refusals import OLLAMA_ROOT
from quire.metrics.log import Log
from quire_gateway.access_log import AccessLog
from quire_gateway.auto_model import AutoModel
from quire_gateway.booking import Booking
from quire_gateway.books import Books
from quire_gateway.catalog import Catalog, Target
from quire_gateway.config import GatewayConfig
from quire_gateway.discovery import Discovery
from quire_gateway.exchange import Exchange
from quire_gateway.filter_kinds import make_filters
from quire_gateway.filtering import Filtering
from quire_gateway.filters import About, Filters
from quire_gateway.fleet import Backend, Fleet
from quire_gateway.health import Poller
from quire_gateway.hedging import Hedging
from quire_gateway.holders import Holders
from quire_gateway.metrics import GatewayMetrics
from quire_gateway.migrate import SEED_BITS, Continuation
from quire_gateway.model_pool import ModelPool
from quire_gateway.ownership import Tenancy
from quire_gateway.placing import Placing
from quire_gateway.prefix_index import TICKS_TO_LIVE
from quire_gateway.promises import Promises
from quire_gateway.regions import Regions
from quire_gateway.reports import Reports
from quire_gateway.retries import RetryBudget, pays
from quire_gateway.routing import Router
from quire_gateway.rows import meets
from quire_gateway.salts import Salts
from quire_gateway.sealed import opened_request, sealing_of
from quire_gateway.tenants import Tenants
from quire_gateway.upstream import BackendFailed, Upstream

log = Log("gateway")


@dataclass(slots=True, eq=False)
class GatewayState:
    """The configuration, the backends and the books. ``upstream`` is there while the application runs."""

    config: GatewayConfig
    router: Router
    fleet: Fleet
    catalog: Catalog
    placing: Placing
    poller: Poller
    discovery: Discovery
    budget: RetryBudget
    holders: Holders
    promises: Promises
    tenancy: Tenancy
    salts: Salts
    metrics: GatewayMetrics
    now: Callable[[], float]  # monotonic seconds
    random: Random
    pool: ModelPool | None = None  # of models that are loaded on demand
    auto: AutoModel | None = None
    hedging: Hedging | None = None
    bodies: LargeBodies = field(default_factory=LargeBodies)
    access_log: AccessLog = field(default_factory=lambda: AccessLog(None, logs=False))
    new_id: Callable[[], str] = new_id
    filters: Filters | None = None
    is_draining: bool = False
    num_open: int = 0
    unix_time: Callable[[], float] = time.time
    _upstream: Upstream | None = None
    _ageing: asyncio.Task[None] | None = None
    _books: Books | None = None
    _tenants: Tenants | None = None
    _booking: Booking | None = None
    _reports: Reports | None = None

    @property
    def is_started(self) -> bool:
        return self._upstream is not None

    @property
    def upstream(self) -> Upstream:
        assert self._upstream is not None, "the gateway has not been started"
        return self._upstream

    @property
    def books(self) -> Books:
        assert self._books is not None, "the gateway has not been started"
        return self._books

    @property
    def tenants(self) -> Tenants:
        assert self._tenants is not None, "the gateway has not been started"
        return self._tenants

    def start(self) -> None:
        """Open the client side and the books, and look for backends; called in the loop that serves.

        Raises:
            ConfigError: the books cannot be opened; nothing has been started then.
        """
        self._books = Books(self.config)
        self.metrics.books = self._books
        self._tenants = Tenants(self.config, self._books)
        self._upstream = Upstream(self.config.timeouts.connect_s)
        self._booking = Booking(self.fleet, self.key_of, self._tenants, self._books)
        self._booking.start(self._upstream)
        self._reports = Reports(self.fleet, self.key_of, self._upstream)
        self.poller.start(self._upstream)
        self.discovery.start()
        self._ageing = asyncio.create_task(self._age())
        if self.pool is not None:
            self.pool.start()

    async def close(self) -> None:
        assert self._ageing is not None
        self._ageing.cancel()
        await self.discovery.close()
        await self.poller.close()
        assert self._booking is not None
        await self._booking.close()
        assert self._reports is not None
        await self._reports.close()
        await self.tenants.close()
        await asyncio.to_thread(self.books.close)
        await self.access_log.close()
        await self.upstream.close()

    async def _age(self) -> None:
        """Let the routing index forget."""
        while True:
            await asyncio.sleep(self.config.routing.index_ttl_s / TICKS_TO_LIVE)
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

    def new_continuation(self) -> Continuation | None:
        """Return what a new answer begins with; None without a key that replicas know: no stream is continued then."""
        if self.config.server.gateway_key is None and self.config.server.admin_key is None:
            return None
        return Continuation(self.new_id(), int(self.unix_time()), secrets.randbits(SEED_BITS))

    def enter_tenant(self, exchange: Exchange) -> None:
        """Open the ids in a request of the task's tenant, and choose its salt.

        Raises:
            RequestError: an id is not of the tenant.
        """
        asked, owner = exchange.asked, self.tenancy.owner(exchange.call.tenant)
        assert asked is not None
        exchange.tenant = exchange.call.tenant
        exchange.salt = self.salts.of(asked, exchange.call)
        exchange.asked = opened_request(asked, owner)
        exchange.sealing = sealing_of(owner, exchange.asked, asked)

    async def admit(self, exchange: Exchange) -> None:
        """Reserve what a request may use at most; only then is it told what becomes of the model that it names.

        A request for a model that is not known, or that its key may not use, counts as a request: it passes no limit.

        Raises:
            HttpError: 429, a limit is used up.
            RequestError: no model can be told, it is not known, or the key may not use it.
        """
        assert exchange.asked is not None
        problem: RequestError | None = None
        try:
            exchange.targets = await self.targets(exchange)
        except RequestError as error:
            problem = error
        model = exchange.targets[0].model if exchange.targets else ""
        await self.tenants.reserve(exchange, model, self.placing.num_tokens(exchange.asked, model))
        if problem is not None:
            raise problem
        self.tenants.check_model(exchange, model)

    async def targets(self, exchange: Exchange) -> list[Target]:
        """Return the models to try for a request. Raises what `Catalog.targets` does."""
        assert exchange.asked is not None
        name = exchange.asked.model or self.config.server.default_model
        if exchange.path.startswith(OLLAMA_ROOT):
            name = self.catalog.tagged(name)
        if self.auto is not None and name == self.auto.name:
            name = await self.auto.choose(exchange.asked, exchange.call.key)
            exchange.extra_headers.append((b"x-quire-model", name.encode()))
        return self.catalog.targets(name)

    async def filter(self, exchange: Exchange) -> None:
        """Show a request to the filters, and make what its answer goes through. Raises `HttpError` if refused."""
        filters, asked = self.filters, exchange.asked
        assert filters is not None and asked is not None  # noqa: PT018
        model = exchange.targets[0].model
        about = About(exchange.request_id, exchange.path, model, exchange.tenant, exchange.key)
        if filters.reads_requests:
            changed = await filters.before(about, asked.plain_body)
            exchange.asked = asked if changed is None else asked.changed_to(changed)
        if filters.reads_answers:
            exchange.filtering = Filtering(filters, about)

    async def settle(self, exchange: Exchange) -> None:
        """A request has ended: count it, learn from its usage, and log it."""
        assert self._booking is not None
        now = self.now()
        await self._booking.settle(exchange)
        usage, slo = exchange.usage, self.config.slo
        exchange.met_slo = slo is not None and meets(slo, exchange, now)
        self.metrics.ended(exchange, now)
        await self.tenants.settle(exchange, now)
        if exchange.asked is not None and exchange.target is not None and usage.prompt_tokens is not None:
            self.placing.learn(exchange.asked, exchange.target.model, usage.prompt_tokens)
        self.access_log.write(exchange, now, self.unix_time())


def make_state(
    config: GatewayConfig, now: Callable[[], float], seed: int, pool: ModelPool | None = None
) -> GatewayState:
    """Return the state of a gateway whose backends have not been polled yet."""
    routing, random = config.routing, Random(seed)
    router = Router(
        routing.policy,
        seed=seed,
        max_load_ratio=routing.max_load_ratio,
        capacity=routing.index_pieces,
        of_text=True,
    )
    fleet = Fleet(router, config.health, random, tuple(model.name for model in pool or ()))
    tenancy = Tenancy(config.server, now)
    poller, salts = Poller(fleet, random, now), Salts(tenancy)
    poller.on_owners = salts.listed
    budget = RetryBudget(config.retries.budget, config.retries.reserve)
    regions = Regions(config.regions) if config.regions is not None else None
    state = GatewayState(
        config=config,
        router=router,
        fleet=fleet,
        catalog=_catalog(config, fleet, random),
        placing=Placing(
            fleet,
            router,
            routing.piece_bytes,
            now,
            lambda exchange, model: pays(exchange, model, config.retries, budget),
            regions,
        ),
        poller=poller,
        discovery=Discovery(fleet, poller, config.backends, now),
        budget=budget,
        holders=Holders(fleet),
        promises=Promises(now),
        tenancy=tenancy,
        salts=salts,
        metrics=GatewayMetrics(fleet, budget),
        now=now,
        random=random,
        access_log=AccessLog(config.server.access_log_file, logs=config.server.access_log),
        pool=pool,
    )
    state.filters = make_filters(config.filters, lambda: state.upstream)
    if config.auto is not None:
        state.auto = AutoModel(
            config.auto, state.placing.num_tokens, lambda *key: state.tenants.limits.budget_left(*key)
        )
    if (config.hedging.after_s, config.hedging.whole_after_s) != (None, None):
        state.hedging = state.metrics.hedging = Hedging(config.hedging)
    state.metrics.filters, state.metrics.auto, state.metrics.regions = state.filters, state.auto, regions
    return state


def _catalog(config: GatewayConfig, fleet: Fleet, random: Random) -> Catalog:
    auto = config.auto.args.name if config.auto is not None else None
    server = config.server
    return Catalog(
        config.models,
        server.default_model,
        lambda: fleet.models,
        random,
        auto,
        fleet.base_of,
        server.stand_ins,
    )
