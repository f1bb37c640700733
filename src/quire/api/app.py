"""`create_app`: the routes of the HTTP API around one `Frontend`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from quire.api.anthropic_messages import count_tokens, messages_job
from quire.api.background import BackgroundResponses
from quire.api.batch_runner import BatchRunner
from quire.api.batches import Batches, batch_routes
from quire.api.chat import chat_job
from quire.api.completions import completion_job
from quire.api.edge import Edge
from quire.api.embeddings import embeddings_job
from quire.api.endpoint import GenerateEndpoint, JsonEndpoint
from quire.api.file_store import FileStore
from quire.api.forecast import TtftForecast
from quire.api.health import Models, Probes
from quire.api.openapi import Description
from quire.api.rerank import rerank_job, score_job
from quire.api.response_store import ResponseStore
from quire.api.responses import StoredResponses, responses_job
from quire.api.routing_errors import add_error_handlers
from quire.api.running import RunningRequests
from quire.api.settings import ApiSettings
from quire.api.state import ApiState
from quire.api.text_tools import detokenize, render, tokenize
from quire.engine.frontend import Frontend
from quire.errors import ConfigError
from quire.metrics.prometheus import ServerMetrics
from quire.metrics.trace import RequestTracer

BATCH_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


def create_app(
    frontend: Frontend,
    settings: ApiSettings,
    *,
    now: Callable[[], float] = time.monotonic,
    unix_time: Callable[[], float] = time.time,
    tracer: RequestTracer | None = None,
    forecast: TtftForecast | None = None,
) -> FastAPI:
    """Return the API over ``frontend``, which may still be starting (then /readyz and requests answer 503)."""
    metrics = ServerMetrics(frontend.model.names[0], frontend.stats, lambda: settings.cache_config)
    metrics.meets_slo = forecast.slo.met if forecast is not None else None
    rng = Random(secrets.randbits(128))  # unique is enough for ids, and a system call for each is dear
    running = RunningRequests()
    state = ApiState(
        frontend,
        settings,
        metrics,
        now,
        unix_time,
        new_id=lambda: f"{rng.getrandbits(128):032x}",
        started_unix=int(unix_time()),
        responses=ResponseStore(settings.response_store_bytes),
        running=running,
        background=BackgroundResponses(running),
        tracer=tracer,
        forecast=forecast,
    )
    app = FastAPI(
        title="Quire",
        version=settings.version,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    routes = _routes(state)
    batches = _batch_runner(state, routes)
    routes += [Route(path, run, methods=ways) for path, run, ways in batch_routes(Batches(state, batches))]
    routes.append(Route("/openapi.json", Description(routes, settings.version).show, methods=["GET"]))
    app.router.routes.extend(routes)
    app.state.quire = state
    app.state.batches = batches
    app.add_middleware(Edge, api_keys=settings.api_keys, new_id=state.new_id)
    if settings.cors_origins:
        # Outside of Edge: a preflight has no key, and a refusal needs the headers too.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[
                "x-request-id",
                "x-quire-ignored-fields",
                "x-quire-predicted-ttft-ms",
                "retry-after",
            ],
        )
    add_error_handlers(app)
    return app


def _batch_runner(state: ApiState, routes: list[Route]) -> BatchRunner | None:
    """What runs batches, through the endpoints of ``routes``; None without --batch-dir."""
    if state.settings.batch_dir is None:
        return None
    root = Path(state.settings.batch_dir)
    endpoints = {route.path: route.app for route in routes if route.path in BATCH_ENDPOINTS}
    try:
        files = FileStore(root, state.new_id, state.unix_time)
        return BatchRunner(
            root,
            files,
            endpoints,
            new_id=state.new_id,
            unix_time=state.unix_time,
            is_busy=state.is_busy,
            concurrency=state.settings.batch_concurrency,
        )
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--batch-dir {root} cannot be used: {error}.") from error


def _routes(state: ApiState) -> list[Route]:
    probes, models, stored = Probes(state), Models(state), StoredResponses(state)
    get = {
        "/livez": probes.livez,
        "/readyz": probes.readyz,
        "/startupz": probes.startupz,
        "/health": probes.health,
        "/version": probes.version,
        "/metrics": probes.metrics,
        "/v1/models": models.listed,
        "/v1/models/{model_id:path}": models.one,
    }
    generate = {
        "/v1/completions": completion_job,
        "/v1/chat/completions": chat_job,
        "/v1/messages": messages_job,
        "/v1/responses": responses_job,
        "/v1/embeddings": embeddings_job,
        "/v1/score": score_job,
        "/score": score_job,
        "/v1/rerank": rerank_job,
        "/rerank": rerank_job,
        "/v2/rerank": rerank_job,
    }
    compute = {
        "/tokenize": tokenize,
        "/detokenize": detokenize,
        "/v1/chat/completions/render": render,
        "/v1/messages/count_tokens": count_tokens,
    }
    # Routes are tried in order: the busy ones come first.
    routes = [
        Route(path, GenerateEndpoint(state, path, job), methods=["POST"]) for path, job in generate.items()
    ]
    routes += [Route(path, JsonEndpoint(state, path, run), methods=["POST"]) for path, run in compute.items()]
    routes += [Route(path, handler, methods=["GET"]) for path, handler in get.items()]
    routes.append(Route("/v1/responses/{response_id}", stored.one, methods=["GET", "DELETE"]))
    routes.append(Route("/v1/responses/{response_id}/input_items", stored.input_items, methods=["GET"]))
    routes.append(Route("/v1/responses/{response_id}/cancel", stored.cancel, methods=["POST"]))
    return routes
