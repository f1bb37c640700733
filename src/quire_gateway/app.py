"""`create_gateway`: the routes of the gateway around one `GatewayState`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any, cast

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from quire.http.browser_guard import guarded
from quire.http.edge import Edge
from quire.http.extension import Extension
from quire.http.held_bytes import HeldBodies
from quire.http.json_page import json_response
from quire.http.rights import holds_key
from quire.http.router_errors import error_handlers
from quire.http.websocket import WebSockets
from quire_gateway.admin import admin_app
from quire_gateway.descriptions import Descriptions
from quire_gateway.ollama_lists import OllamaLists
from quire_gateway.proxy import Proxy
from quire_gateway.stages import model_app
from quire_gateway.state import GatewayState
from quire_gateway.stored import StoredProxy

# What a replica of Quire serves, and what other servers with OpenAI's API have beside it.
POST_PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/score",
    "/score", "/v1/rerank", "/rerank", "/v2/rerank", "/tokenize", "/detokenize", "/v1/chat/completions/render",
    "/v1/messages/count_tokens", "/v1/moderations", "/v1/images/generations", "/v1/audio/speech", "/pooling",
    "/classify", "/v1/responses/input_tokens", "/completion", "/infill", "/generate", "/generate_stream",
    "/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show", "/embed", "/embed_all", "/embed_sparse",
    "/predict", "/similarity", "/v2/embed",
)  # fmt: skip
_MODEL_PATHS = ("/v1/models/load", "/v1/models/unload")
Handler = Callable[[Request], Awaitable[Response]]


def create_gateway(state: GatewayState, extension: Extension | None = None) -> ASGIApp:
    """Return the gateway's application; the backends of the configuration are added when it starts.

    Of ``extension`` the routes and the lifespan are used: batches run on the gateway, as its own requests.
    """
    extension = extension or Extension()
    probes = Probes(state)
    get: dict[str, Handler] = {
        "/livez": probes.livez,
        "/readyz": probes.readyz,
        "/startupz": probes.readyz,
        "/health": probes.readyz,
        "/metrics": probes.metrics,
    }
    stored = StoredProxy(state)
    of_response = {"": ["GET", "DELETE"], "/input_items": ["GET"], "/cancel": ["POST"]}

    def count(status: int) -> None:
        state.metrics.requests.update([("other", str(status), "refused")])

    app = Starlette(
        routes=[
            *(Route(path, Proxy(state, path), methods=["POST"]) for path in POST_PATHS),
            *(Route(path, handler, methods=["GET"]) for path, handler in get.items()),
            *(
                Route(f"/v1/responses/{{response_id}}{end}", stored, methods=methods)
                for end, methods in of_response.items()
            ),
            *Descriptions(state, lambda: {r.path for r in app.routes if isinstance(r, Route)}).routes(),
            *OllamaLists(state).routes(),
            *extension.routes,
        ],
        middleware=[
            Middleware(WebSockets),
            Middleware(HeldBodies),
            Middleware(
                Edge,
                api_keys=state.config.server.api_keys,
                new_id=state.new_id,
                key_file=state.tenancy.key_file,
            ),
        ],
        exception_handlers=error_handlers(count),
        lifespan=_lifespan(state, extension),
    )
    app.router.redirect_slashes = False
    models = None if state.pool is None else model_app(state.pool, count)
    served: Any = guarded(_Split(app, admin_app(state), models), state.config.server.browser_rules)
    trusted = list(state.config.server.forwarded_allow_ips)
    return cast(ASGIApp, ProxyHeadersMiddleware(served, trusted)) if trusted else cast(ASGIApp, served)


class _Split:
    """ASGI: ``/admin/…``, and what loads models, have their own key and application."""

    def __init__(self, app: ASGIApp, admin: ASGIApp, models: ASGIApp | None) -> None:
        self._app = app
        self._admin = admin
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app, path = self._app, scope["path"] if scope["type"] == "http" else ""
        if path.startswith("/admin/"):
            app = self._admin
        elif self._models is not None and path in _MODEL_PATHS:
            app = self._models
        await app(scope, receive, send)


class Probes:
    """GET endpoints of the gateway itself."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state

    async def livez(self, request: Request) -> Response:
        """200 while the process answers."""
        return json_response({"status": "alive"})

    async def readyz(self, request: Request) -> Response:
        """200 if any backend takes requests, or would once its model is loaded; 503 otherwise, and while draining."""
        if self._state.is_draining:
            return json_response({"status": "draining"}, 503)
        is_ready = self._state.pool is not None or any(b.is_ready or b.is_silent for b in self._state.fleet)
        return json_response({"status": "ready" if is_ready else "starting"}, 200 if is_ready else 503)

    async def answers(self) -> dict[str, Response]:
        """Return the answers now, for the process that gives them (`quire.http.front`)."""
        request = Request({"type": "http"})
        ready = await self.readyz(request)
        return {"/livez": await self.livez(request)} | dict.fromkeys(
            ("/readyz", "/startupz", "/health"), ready
        )

    async def metrics(self, request: Request) -> Response:
        """Metrics in Prometheus's text form, or OpenMetrics; tenants for the holder of the admin key."""
        server, accept = self._state.config.server, request.headers.get("accept", "")
        with_tenants = server.metrics_tenants or holds_key(request.scope, server.admin_key)
        body, content_type = self._state.metrics.exposition(accept, with_tenants=with_tenants)
        return Response(body, headers={"content-type": content_type})


def _lifespan(state: GatewayState, extension: Extension) -> Lifespan[Starlette]:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None, None]:
        if not state.is_started:
            state.start()
        try:
            async with extension.lifespan(app) if extension.lifespan is not None else nullcontext():
                yield
        finally:
            await state.close()
            state.bodies.close()

    return lifespan
