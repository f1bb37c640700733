"""Which stages are on: the one list. A stage that is off is not imported.

Requests pass the stages in the order of this list, except where `quire_gateway.stage` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from quire.clock import WallClock
from quire_gateway.state import GatewayState, Stages

if TYPE_CHECKING:
    from quire_gateway.model_pool import ModelPool


def make_stages(state: GatewayState) -> Stages:
    """Return the stages of a configuration.

    Raises:
        ConfigError: a hook of a filter, or the judge of the automatic model, cannot be loaded.
    """
    stages = Stages()
    _count(stages, state)
    _name(stages, state)
    _serve(stages, state)
    return stages


def _count(stages: Stages, state: GatewayState) -> None:
    """What is counted and booked. A request is refused by these first, and ends with these."""
    config, on = state.config, stages.on
    if config.has_replica_key:
        from quire_gateway.replica_usage import BrokenUsage, UsageReader

        on.append(BrokenUsage(UsageReader(state.key_of, lambda: state.upstream)))
    on.append(state.metrics)
    if config.server.ledger is not None:
        from quire_gateway.books import Bookkeeping

        stages.bookkeeping = Bookkeeping(config, state.now)
        on.append(stages.bookkeeping)
    if config.has_limits or config.server.redis is not None:
        from quire_gateway.tenants import Tenants

        redis = None
        if config.server.redis is not None:
            from quire_gateway.redis_store import RedisStore

            redis = RedisStore(config.server.redis, WallClock())
        stages.tenants = Tenants(config, redis)
        on.append(stages.tenants)
    if stages.bookkeeping is not None:
        from quire_gateway.booking import Booking
        from quire_gateway.replica_usage import UsageReader

        reader = UsageReader(state.key_of, lambda: state.upstream)
        on.append(Booking(state.fleet, reader, stages.bookkeeping, stages.tenants))


def _name(stages: Stages, state: GatewayState) -> None:
    """Whose a request is, and by which names it goes to a backend."""
    config, on = state.config, stages.on
    if config.server.key_file is not None:
        from quire_gateway.salts import Salts
        from quire_gateway.sealed import Sealed

        salts = Salts(state.tenancy)
        state.poller.on_owners = salts.listed
        stages.sealed = Sealed(state.tenancy)
        on += [salts, stages.sealed]
    if config.has_replica_key:
        from quire_gateway.continuing import Continuing

        bookkeeping = stages.bookkeeping

        def ledger_id() -> str:
            return bookkeeping.books.ledger_id if bookkeeping is not None else ""

        on.append(Continuing(state.key_of, ledger_id, state.new_id, state.now, state.unix_time))
    if config.has_replica_key and state.router.needs_events:
        from quire_gateway.reports import Reports

        on.append(Reports(state.fleet, state.key_of, lambda: state.upstream, config.routing.piece_bytes))
    if config.auto is not None:
        from quire_gateway.auto_model import AutoModel

        on.append(AutoModel(config.auto, state.placing.num_tokens, stages.budget_left))


def _serve(stages: Stages, state: GatewayState) -> None:
    """Around the attempts, from the outermost one."""
    config, server, on = state.config, state.config.server, stages.on
    if config.filters:
        from quire_gateway.filter_kinds import make_filters
        from quire_gateway.filtering import FilterStage

        stages.filters = FilterStage(make_filters(config.filters, lambda: state.upstream))
        on.append(stages.filters)
    if state.pool is not None:
        on.append(state.pool)
    from quire_gateway.stored import Responses

    on.append(Responses(state))
    if config.hedging.after_s is not None or config.hedging.whole_after_s is not None:
        from quire_gateway.hedging import Hedging

        stages.hedging = Hedging(config.hedging, state.placing, state.count_failure)
        on.append(stages.hedging)
    if config.regions is not None:
        from quire_gateway.regions import Regions, RegionStage

        stages.regions = Regions(config.regions)
        regions = RegionStage(stages.regions, state.fleet, state.router)
        state.placing.narrow = regions.narrow
        on.append(regions)
    if config.disaggregation is not None:
        from quire_gateway.disaggregation import Disaggregation

        disaggregation = Disaggregation(
            config, state.fleet, state.router, state.placing, state.count_failure, state.now
        )
        state.placing.narrow = disaggregation.narrow
        on.append(disaggregation)
    if server.access_log or server.access_log_file is not None:
        from quire_gateway.access_log import AccessLog

        on.append(AccessLog(server.access_log_file, logs=server.access_log, unix_time=state.unix_time))


def model_app(pool: ModelPool, count: Callable[[int], None]) -> ASGIApp:
    """Return the endpoints that load models into a pool; ``count``: told the status of each refusal."""
    from quire_gateway import model_routes

    return model_routes.model_app(pool, count)
