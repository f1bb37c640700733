"""`create_app`: the routes of the HTTP API around one `Frontend`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.api.busy import Busy
from quire.api.call_stages import CallStages
from quire.api.dialect import Dialect
from quire.api.dialects import DIALECTS
from quire.api.dialects.responses.store import ResponseStore
from quire.api.endpoint import CallStage, GenerateEndpoint, JsonEndpoint
from quire.api.forecast import TtftForecast
from quire.api.health import About, Models, Probes
from quire.api.late import Late, LateHandler
from quire.api.live_feed import LIVE_PATH, LiveFeed
from quire.api.settings import ApiSettings
from quire.api.state import ApiState, RunningRequests, output_format
from quire.engine.frontend import Frontend
from quire.engine.large_body import LargeBodies
from quire.http.browser_guard import BrowserRules
from quire.http.edge import Edge, Stages, new_id
from quire.http.extension import Extension
from quire.http.router_errors import error_handlers
from quire.metrics.server import ServerMetrics
from quire.metrics.trace import RequestTracer
from quire.text.infill import find_infill


def create_app(
    frontend: Frontend,
    settings: ApiSettings,
    *,
    extension: Extension | None = None,
    now: Callable[[], float] = time.monotonic,
    unix_time: Callable[[], float] = time.time,
    tracer: RequestTracer | None = None,
    forecast: TtftForecast | None = None,
) -> Starlette:
    """Return the API over ``frontend``, which may still be starting: /readyz and requests then answer 503.

    ``extension`` is mounted beside the API's own routes.
    """
    metrics = ServerMetrics(frontend.model.names[0], frontend.stats, lambda: settings.cache_config)
    metrics.meets_slo = forecast.slo.met if forecast is not None else None
    state = ApiState(
        frontend,
        frontend.model,
        settings,
        metrics,
        now,
        unix_time,
        new_id=new_id,
        started_unix=int(unix_time()),
        reasons=output_format(settings, frontend.chat_template, has_tools=False).reasons,
        responses=ResponseStore(settings.response_store_bytes, settings.response_dir),
        running=RunningRequests(),
        bodies=LargeBodies(),
        busy=Busy(),
        tracer=tracer,
        forecast=forecast,
    )
    stages = CallStages.of(frontend, settings, now, unix_time)
    extension = extension or Extension()
    app = Starlette(
        routes=_with_extension(_routes(state, stages), extension, settings.version, partial(_served, state)),
        middleware=[
            Middleware(Stages, rules=BrowserRules(settings.cors_origins, settings.allowed_hosts)),
            Middleware(
                Edge,
                api_keys=settings.api_keys,
                new_id=state.new_id,
                key_file=settings.key_file,
                gateway_key=settings.gateway_key,
            ),
        ],
        exception_handlers=error_handlers(lambda status: metrics.response("other", status)),
        lifespan=extension.lifespan,
    )
    app.router.redirect_slashes = False
    app.state.quire = state
    app.state.work = extension.work
    app.state.journal = stages.journal
    return app


def _served(state: ApiState) -> tuple[Any, ...]:
    """Return the fields of `quire.api.openapi.Served`, what the description of the API says of the model."""
    model, config = state.model, state.settings.model
    return (
        (*model.names, *state.adapter_names),
        model.vocab_size,
        model.max_model_len,
        None if config is None else config.spec.hidden_size,
        find_infill(state.frontend.tokenizer) is not None,
    )


def _with_extension(
    own: list[Route], extension: Extension, version: str, served: Callable[[], tuple[Any, ...]]
) -> list[Route]:
    """Return all routes, and the one that describes them."""
    if extension.around is not None:
        root, around = extension.around
        for route in own:
            if route.path == root or route.path.startswith(root + "/"):
                route.app = around(route.app)
    routes = [*own, *extension.routes]
    made: list[Any] = []

    async def openapi(request: Request) -> Response:
        """The description of this API."""
        if not made:
            load = Late("quire.api.openapi:Description").load()
            made.append(load(routes, extension.bodies, version, served))
        answer: Response = await made[0].show(request)
        return answer

    routes.append(Route("/openapi.json", openapi, methods=["GET"]))
    return routes


def _routes(state: ApiState, stages: CallStages) -> list[Route]:
    probes, models, about = Probes(state), Models(state), About(state)
    get = {
        "/livez": probes.livez,
        "/readyz": probes.readyz,
        "/startupz": probes.startupz,
        "/health": probes.health,
        "/version": probes.version,
        "/metrics": probes.metrics,
        "/v1/models": models.listed,
        "/v1/models/{model_id:path}": models.one,
        "/": about.page,
        "/docs": about.docs,
        "/tokenizer_info": about.tokenizer_info,
        "/props": about.props,
        "/slots": about.slots,
        LIVE_PATH: LiveFeed(state).show,
    }
    routes: list[Route] = []
    endpoints: dict[str, GenerateEndpoint] = {}
    for dialect in DIALECTS:
        routes += dialect_routes(dialect, state, stages.listed(), endpoints)
    routes += [Route(path, handler, methods=["GET"]) for path, handler in get.items()]
    return routes + stages.routes(state, endpoints)


def dialect_routes(
    dialect: Dialect, state: ApiState, stages: Sequence[CallStage], endpoints: dict[str, GenerateEndpoint]
) -> list[Route]:
    """Return the routes of a dialect, and add its endpoints that generate to ``endpoints``, by path."""
    if dialect.stage:
        stages = (Late(dialect.stage).load()(), *stages)
    routes = []
    for path, late in dialect.read.items():
        read = late.load() if path in dialect.loaded_at_start else late
        endpoints[path] = endpoint = GenerateEndpoint(state, path, read, stages)
        routes.append(Route(path, endpoint, methods=["POST"]))
    for path, compute in dialect.compute.items():
        routes.append(Route(path, JsonEndpoint(state, path, compute), methods=["POST"]))
    for handled in dialect.handled:
        handler, methods = LateHandler(state, handled.handler), list(handled.methods)
        shown = handled.is_described
        routes.append(Route(handled.path, handler.handle, methods=methods, include_in_schema=shown))
    return routes
