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

from quire.api.anthropic import count_tokens, messages_job
from quire.api.busy import Busy
from quire.api.call_stages import CallStages
from quire.api.chat import chat_job
from quire.api.completions import completion_job
from quire.api.endpoint import CallStage, Compute, GenerateEndpoint, JsonEndpoint, Prepare
from quire.api.health import About, Models, Probes
from quire.api.late import Late
from quire.api.live_feed import LIVE_PATH, LiveFeed
from quire.api.ollama import OllamaEndpoint, embed_job, ollama_chat_job, ollama_generate_job
from quire.api.ollama import embeddings_job as ollama_embeddings_job
from quire.api.ollama_models import OllamaModels, show
from quire.api.responses import StoredResponses, count_input, responses_job
from quire.api.state import ApiSettings, ApiState, ResponseStore, RunningRequests, TtftForecast, output_format
from quire.engine.frontend import Frontend
from quire.engine.large_body import LargeBodies
from quire.http.browser_guard import BrowserRules
from quire.http.edge import Edge, Extension, error_handlers, new_id
from quire.http.stages import Stages
from quire.metrics.prometheus import ServerMetrics
from quire.metrics.trace import RequestTracer
from quire.text.infill import infill_of

# What few servers are asked for, by path. It is loaded with the first request for it.
LATE_GENERATE: dict[str, Late] = {
    "/v1/embeddings": Late("quire.api.pooling:embeddings_job"),
    **dict.fromkeys(("/v1/score", "/score"), Late("quire.api.pooling:score_job")),
    **dict.fromkeys(("/v1/rerank", "/rerank", "/v2/rerank"), Late("quire.api.pooling:rerank_job")),
}
LATE_COMPUTE: dict[str, Late] = {
    "/tokenize": Late("quire.api.text_tools:tokenize"),
    "/detokenize": Late("quire.api.text_tools:detokenize"),
    "/v1/chat/completions/render": Late("quire.api.text_tools:render"),
}
LATE_NATIVE: dict[str, Late] = {
    "/completion": Late("quire.api.native_forms:llama_completion_job"),
    "/infill": Late("quire.api.native_forms:llama_infill_job"),
    "/generate": Late("quire.api.native_forms:tgi_job"),
    "/generate_stream": Late("quire.api.native_forms:tgi_stream_job"),
}


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
        infill_of(state.frontend.tokenizer) is not None,
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
        LIVE_PATH: LiveFeed(state).show,
    }
    generate: dict[str, Prepare] = {
        "/v1/completions": completion_job,
        "/v1/chat/completions": chat_job,
        "/v1/messages": messages_job,
        "/v1/responses": responses_job,
        **LATE_GENERATE,
    }
    compute: dict[str, Compute] = {
        **LATE_COMPUTE,
        "/v1/messages/count_tokens": count_tokens,
        "/v1/responses/input_tokens": count_input,
    }
    # Routes are tried in order: the busy ones come first.
    listed = stages.listed()
    endpoints = {path: GenerateEndpoint(state, path, job, listed) for path, job in generate.items()}
    routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]
    routes += [Route(path, JsonEndpoint(state, path, run), methods=["POST"]) for path, run in compute.items()]
    routes += [Route(path, handler, methods=["GET"]) for path, handler in get.items()]
    routes.append(Route("/v1/responses/{response_id}", stored.one, methods=["GET", "DELETE"]))
    routes.append(Route("/v1/responses/{response_id}/input_items", stored.input_items, methods=["GET"]))
    routes.append(Route("/v1/responses/{response_id}/cancel", stored.cancel, methods=["POST"]))
    routes += stages.routes(state, endpoints)
    for path, job in LATE_NATIVE.items():
        endpoint = GenerateEndpoint(state, path, job, listed)
        routes.append(Route(path, endpoint, methods=["POST"], include_in_schema=False))
    return routes + _ollama_routes(state, listed)


def _ollama_routes(state: ApiState, stages: Sequence[CallStage]) -> list[Route]:
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
        *(
            Route(path, OllamaEndpoint(state, path, job, stages), methods=["POST"])
            for path, job in generate.items()
        ),
        Route("/api/show", JsonEndpoint(state, "/api/show", show), methods=["POST"]),
        *(Route(path, handler, methods=["GET"]) for path, handler in get.items()),
        *(
            Route(f"/api/{path}", models.manage, methods=methods, include_in_schema=False)
            for path, methods in refused.items()
        ),
    ]
