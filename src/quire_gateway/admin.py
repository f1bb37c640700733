"""``/admin/…``: what the gateway knows, and what an operator may change. It has a key of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import ConfigError, RequestError
from quire.http.body import read_json, send_json
from quire.http.browser_guard import NoBrowsers
from quire.http.edge import Edge, new_id
from quire.http.heartbeat import TTL_S
from quire.http.json_page import json_response
from quire.http.limits import INLINE_BYTES
from quire.http.listen import is_loopback
from quire.http.refusals import Refusal
from quire.http.router_errors import error_handlers
from quire.http.wire import AnyObject, Integer, Number, Text, Texts, Wire, not_allowed, parse
from quire.metrics.log import Log
from quire_gateway.admin_keys import AdminKeys
from quire_gateway.config_file import checked_url
from quire_gateway.discovery import Registration
from quire_gateway.fleet import Backend
from quire_gateway.state import GatewayState

log = Log("gateway")


class Heartbeat(Wire):
    """Body of ``POST /admin/backends``, which a replica sends again before ``ttl_s`` has passed."""

    name: Text
    url: Text
    models: Texts
    ttl_s: Number = TTL_S
    api_key: Text | None = None
    max_requests: Integer | None = None
    region: Text | None = None
    role: Literal["prefill", "decode", "both"] = "both"
    about: AnyObject | None = None


class BackendPatch(Wire):
    """Body of ``PATCH /admin/backends/{name}``."""

    state: Literal["active", "draining"] | None = None
    role: Literal["prefill", "decode", "both"] | None = None


def admin_app(state: GatewayState) -> ASGIApp:
    """Return the application. Without ``admin_key`` it answers only where the gateway listens on this machine alone."""
    server, admin = state.config.server, Admin(state)
    if server.admin_key is None and not is_loopback(server.host):
        return _closed
    return Starlette(
        routes=[
            Route("/admin/backends", admin.backends, methods=["GET"]),
            Route("/admin/backends", admin.register, methods=["POST"]),
            Route("/admin/backends/{name:path}", admin.backend, methods=["GET"]),
            Route("/admin/backends/{name:path}", admin.deregister, methods=["DELETE"]),
            Route("/admin/backends/{name:path}", admin.change, methods=["PATCH"]),
            Route("/admin/routing", admin.routing, methods=["GET"]),
            *AdminKeys(state).routes(),
        ],
        middleware=[
            Middleware(NoBrowsers),
            Middleware(Edge, api_keys=(server.admin_key,) if server.admin_key else (), new_id=new_id),
        ],
        exception_handlers=error_handlers(
            lambda status: state.metrics.requests.update([("/admin", str(status), "refused")])
        ),
    )


async def _closed(scope: Scope, receive: Receive, send: Send) -> None:
    refusal = Refusal(
        403, "The admin surface is closed: set admin_key in the gateway's configuration.", code="closed"
    )
    await send_json(send, refusal.status, refusal.body())


class Admin:
    """The handlers."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state

    async def backends(self, request: Request) -> Response:
        """Every backend: what it serves, its health and its load."""
        return json_response({"object": "list", "data": [self._card(b) for b in self._state.fleet]})

    async def backend(self, request: Request) -> Response:
        """One of them."""
        return json_response(self._card(self._state.fleet.named(request.path_params["name"])))

    async def register(self, request: Request) -> Response:
        """Take a replica's heartbeat. A replica that listens on every address is reached where it called from."""
        heartbeat = parse(Heartbeat, await read_json(request.scope, request.receive, INLINE_BYTES))
        caller = request.client.host if request.client is not None else "127.0.0.1"
        if not 1.0 <= heartbeat.ttl_s <= 3600.0:
            raise not_allowed("ttl_s", heartbeat.ttl_s, "a number of seconds in 1…3600")
        try:
            url = checked_url(heartbeat.url, "url")
        except ConfigError as error:
            raise RequestError(str(error), param="url") from error
        if (host := urlsplit(url).hostname) and is_loopback(host) and not is_loopback(caller):
            url = url.replace(host, f"[{caller}]" if ":" in caller else caller, 1)
        registration = Registration(
            heartbeat.name,
            url,
            tuple(heartbeat.models),
            heartbeat.ttl_s,
            heartbeat.api_key,
            heartbeat.max_requests,
            heartbeat.region,
            heartbeat.role,
            heartbeat.about or {},
        )
        return json_response(self._card(self._state.discovery.register(registration)))

    async def deregister(self, request: Request) -> Response:
        """Forget a replica that has registered itself; its running requests go on."""
        self._state.discovery.deregister(request.path_params["name"])
        return json_response({"deleted": True})

    async def change(self, request: Request) -> Response:
        """Drain a backend, or let it take requests again. Its running requests go on."""
        backend = self._state.fleet.named(request.path_params["name"])
        patch = parse(BackendPatch, await read_json(request.scope, request.receive, INLINE_BYTES))
        if patch.state is None and patch.role is None:
            raise RequestError("The body is empty: it must have state, role or both.", param="state")
        if backend.is_draining and patch.state == "active":
            backend.breaker.recover(self._state.now())
        if patch.state is not None:
            backend.is_draining = patch.state == "draining"
        if patch.role is not None:
            backend.args = replace(backend.args, role=patch.role)
        log.info("backend_changed", backend=backend.name, state=patch.state, role=backend.args.role)
        return json_response(self._card(backend))

    async def routing(self, request: Request) -> Response:
        """The policy, the models and their splits, and the retry budget."""
        state = self._state
        models = {
            name: {
                "split": dict(model.split),
                "fallbacks": model.fallbacks,
                "fallback_when": sorted(model.when),
            }
            for name, model in state.config.models.items()
        }
        budget = state.budget
        return json_response(
            {
                "policy": state.router.policy,
                "max_load_ratio": state.config.routing.max_load_ratio,
                "models": models,
                "regions": state.stages.regions.shown() if state.stages.regions is not None else None,
                "served": {name: [b.name for b in state.fleet.serving(name)] for name in state.fleet.models},
                "retries": {"balance": round(budget.balance, 2), "taken": budget.num_taken,
                            "refused": budget.num_refused},
            }
        )  # fmt: skip

    def _card(self, backend: Backend) -> dict[str, Any]:
        state, now = self._state, self._state.now()
        load = state.router.loads[backend.number]
        return {
            "name": backend.name,
            "url": backend.url,
            "source": backend.source,
            "region": backend.args.region,
            "role": backend.args.role,
            "models": sorted(backend.models),
            "state": "draining" if backend.is_draining else "ready" if backend.is_ready else "unready",
            "why": backend.failure,
            "breaker": backend.breaker.state(now),
            "share": round(backend.breaker.share(now), 3),
            "ejections": backend.breaker.num_ejections,
            "requests": load.requests,
            "tokens": load.tokens,
            "queued_tokens": load.queued_tokens,
            "about": backend.about,
            "ttft_ms_per_token": round(1e3 * state.router.ttft.per_token_s(backend.number), 4),
        }
