"""`create_app`: the routes of the HTTP API around one `Frontend`. `run`: uvicorn around them.

bind → listen (livez 200, readyz 503) ─ frontend.start() → ready (readyz 200)
SIGTERM or SIGINT → draining (readyz and new requests 503) → running requests end, or the grace time → exit 0
a second signal → exit at once
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

import uvloop
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from quire.api.anthropic import count_tokens, messages_job
from quire.api.cache_feed import CacheFeed
from quire.api.chat import chat_job
from quire.api.completions import completion_job
from quire.api.endpoint import GenerateEndpoint, JsonEndpoint
from quire.api.finished import FinishedUsage
from quire.api.full_queue import FullQueue
from quire.api.health import About, Models, Probes
from quire.api.ollama import OllamaEndpoint, embed_job, ollama_chat_job, ollama_generate_job
from quire.api.ollama import embeddings_job as ollama_embeddings_job
from quire.api.ollama_models import OllamaModels, show
from quire.api.openapi import Description
from quire.api.pooling import embeddings_job, rerank_job, score_job
from quire.api.responses import StoredResponses, count_input, responses_job
from quire.api.state import ApiSettings, ApiState, ResponseStore, RunningRequests, TtftForecast
from quire.api.text_tools import detokenize, render, tokenize
from quire.engine.build import EngineInfo
from quire.engine.frontend import Frontend
from quire.engine.large_body import LargeBodies
from quire.errors import QuireError
from quire.http.account import USAGE_PATH
from quire.http.cache_messages import CACHE_PATH
from quire.http.drain import DrainingServer, SideApp, served_beside
from quire.http.edge import Edge, Extension, error_handlers, id_source
from quire.http.listen import Tls, bind, url_of
from quire.http.websocket import LOCAL_ORIGINS, WebSockets, is_local_origin
from quire.metrics.log import Log
from quire.metrics.prometheus import ServerMetrics
from quire.metrics.trace import RequestTracer


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
        settings,
        metrics,
        now,
        unix_time,
        new_id=id_source(),
        started_unix=int(unix_time()),
        responses=ResponseStore(settings.response_store_bytes),
        running=RunningRequests(),
        bodies=LargeBodies(),
        full_queue=FullQueue(lambda: frontend.num_requests, now),
        finished=FinishedUsage(settings.gateway_key, unix_time),
        tracer=tracer,
        forecast=forecast,
    )
    extension = extension or Extension()
    own = _routes(state)
    if extension.around is not None:
        root, around = extension.around
        for route in own:
            if route.path == root or route.path.startswith(root + "/"):
                route.app = around(route.app)
    routes = [*own, *extension.routes]
    description = Description(routes, extension.bodies, settings.version)
    routes.append(Route("/openapi.json", description.show, methods=["GET"]))
    app = Starlette(
        routes=routes,
        middleware=[
            *_of_pages(settings.cors_origins),
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
    return app


def _of_pages(origins: tuple[str, ...]) -> list[Middleware]:
    """Return what web pages may do. Outside of `Edge`: a preflight has no key, and a refusal needs the headers too.

    Without ``origins``, pages that this machine serves are allowed.
    """
    exposed = ["x-request-id", "x-quire-ignored-fields", "x-quire-predicted-ttft-ms", "retry-after"]

    def allows(origin: str) -> bool:
        return origin in origins or "*" in origins if origins else is_local_origin(origin)

    return [
        Middleware(WebSockets, allows=allows),
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_origin_regex=None if origins else LOCAL_ORIGINS,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=exposed,
        ),
    ]


def _routes(state: ApiState) -> list[Route]:
    probes, models, stored, about = Probes(state), Models(state), StoredResponses(state), About(state)
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
        USAGE_PATH: state.finished.show,
        CACHE_PATH: CacheFeed(state.frontend, state.settings.gateway_key).show,
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
        "/v1/responses/input_tokens": count_input,
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
    return routes + _ollama_routes(state)


def _ollama_routes(state: ApiState) -> list[Route]:
    models = OllamaModels(state)
    generate = {
        "/api/chat": ollama_chat_job,
        "/api/generate": ollama_generate_job,
        "/api/embed": embed_job,
        "/api/embeddings": ollama_embeddings_job,
    }
    get = {"/api/tags": models.tags, "/api/ps": models.ps, "/api/version": models.version}
    refused = {"pull": ["POST"], "push": ["POST"], "create": ["POST"], "copy": ["POST"], "delete": ["DELETE"]}
    refused["blobs/{digest}"] = ["GET", "POST"]
    return [
        *(Route(path, OllamaEndpoint(state, path, job), methods=["POST"]) for path, job in generate.items()),
        Route("/api/show", JsonEndpoint(state, "/api/show", show), methods=["POST"]),
        *(Route(path, handler, methods=["GET"]) for path, handler in get.items()),
        *(Route(f"/api/{path}", models.manage, methods=methods) for path, methods in refused.items()),
    ]


log = Log("server")
ReadyHook = Callable[[str, EngineInfo], None]  # (base URL, what the engine says of itself)


def run(
    app: Starlette,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    drain_timeout_s: float = 30.0,
    on_ready: ReadyHook | None = None,
    sock: socket.socket | None = None,
    admin: SideApp | None = None,
    tls: Tls | None = None,
) -> int:
    """Serve ``app`` until a signal; return the exit status: 0 after a drain, 1 when the engine could not start.

    ``sock`` is an already bound socket, instead of ``host`` and ``port``. The frontend is started and closed here, in
    the loop that serves. ``admin`` is served beside it, from before the engine is ready until after the drain.
    """
    sock = sock if sock is not None else bind(host, port)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(app, sock, drain_timeout_s, on_ready, admin, tls))


async def _serve(
    app: Starlette,
    sock: socket.socket,
    drain_timeout_s: float,
    on_ready: ReadyHook | None,
    admin: SideApp | None,
    tls: Tls | None,
) -> int:
    state: ApiState = app.state.quire
    frontend = state.frontend

    async def drain() -> None:
        log.info("draining", requests=frontend.num_requests, grace_s=drain_timeout_s)
        await frontend.drain(drain_timeout_s)

    def on_cut(reason: str) -> None:
        state.metrics.counters[f"quire:http_{reason}s"] += 1

    server = DrainingServer(app, drain, on_cut=on_cut, ask=Probes(state).answers, tls=tls)
    starting = asyncio.create_task(_start(server, frontend, url_of(sock, secure=tls is not None), on_ready))
    try:
        async with served_beside(admin):
            await server.serve([sock])
        if not starting.done():
            starting.cancel()
            return 0
        return starting.result()
    except asyncio.CancelledError:
        return 0
    finally:
        state.bodies.close()
        await frontend.close()


async def _start(server: DrainingServer, frontend: Frontend, url: str, on_ready: ReadyHook | None) -> int:
    try:
        info = await frontend.start()
    except QuireError as error:
        log.error("start_failed", error=str(error))
        server.should_exit = True
        return 1
    log.info("ready", url=url, model=frontend.model.names[0], context=frontend.model.max_model_len)
    if on_ready is not None:
        on_ready(url, info)
    return 0
