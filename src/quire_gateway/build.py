"""`make_state`: a gateway from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from quire_gateway.catalog import Catalog
from quire_gateway.config import GatewayConfig
from quire_gateway.discovery import Discovery
from quire_gateway.fleet import Fleet
from quire_gateway.health import Poller
from quire_gateway.holders import Holders
from quire_gateway.metrics import GatewayMetrics
from quire_gateway.ownership import Tenancy
from quire_gateway.placing import Placing
from quire_gateway.retries import RetryBudget, pays
from quire_gateway.routing import Router
from quire_gateway.stages import make_stages
from quire_gateway.state import GatewayState

if TYPE_CHECKING:
    from quire_gateway.model_pool import ModelPool


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
    poller = Poller(fleet, random, now)
    budget = RetryBudget(config.retries.budget, config.retries.reserve)
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
            lambda attempts, model: pays(attempts, model, config.retries, budget),
        ),
        poller=poller,
        discovery=Discovery(fleet, poller, config.backends, now),
        budget=budget,
        holders=Holders(fleet),
        tenancy=tenancy,
        metrics=GatewayMetrics(fleet, budget, config.slo),
        now=now,
        random=random,
        pool=pool,
    )
    state.stages = make_stages(state)
    state.metrics.stages = state.stages.on
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
