"""`OllamaLists`: the GET endpoints of Ollama's API at the gateway, from the lists of its backends."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.http.body import read_json
from quire.http.json_page import json_response
from quire.http.refusals import LATEST, OLLAMA_VERSION, HttpError, Refusal
from quire_gateway.fleet import Backend
from quire_gateway.state import GatewayState
from quire_gateway.upstream import ASIDE_TIMEOUT_S, BackendFailed

_MANAGE = {"pull": "POST", "push": "POST", "create": "POST", "copy": "POST", "delete": "DELETE"}
# Of a model whose backend has no such list.
_UNKNOWN = {"format": "", "family": "", "families": [], "parameter_size": "", "quantization_level": ""}
_EMPTY = {"modified_at": "1970-01-01T00:00:00Z", "size": 0, "digest": "", "details": _UNKNOWN}


class OllamaLists:
    """The handlers. The models are those of ``/v1/models``, with Ollama's tag."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state

    def routes(self) -> list[Route]:
        get = {"tags": self.tags, "ps": self.ps, "version": self.version}
        return [
            *(Route(f"/api/{name}", handler, methods=["GET"]) for name, handler in get.items()),
            *(Route(f"/api/{verb}", self.manage, methods=[method]) for verb, method in _MANAGE.items()),
            Route("/api/blobs/{digest}", self.manage, methods=["GET", "POST"]),
        ]

    async def tags(self, request: Request) -> Response:
        """The models that clients may name (Ollama's form)."""
        return json_response({"models": await self._models("/api/tags", every=True)})

    async def ps(self, request: Request) -> Response:
        """Those that a backend has loaded (Ollama's form)."""
        return json_response({"models": await self._models("/api/ps", every=False)})

    async def version(self, request: Request) -> Response:
        """The version of Ollama's API that is answered here, and Quire's."""
        return json_response({"version": OLLAMA_VERSION, "quire": __version__})

    async def manage(self, request: Request) -> Response:
        """Refuse what changes models on disk; a pull of a model that is served has nothing to do."""
        if request.url.path == "/api/pull":
            body = await read_json(
                request.scope, request.receive, self._state.config.server.max_body_mib * 2**20
            )
            name = body.get("model", body.get("name")) if isinstance(body, dict) else None
            if isinstance(name, str) and self._state.catalog.tagged(name) in self._state.catalog.names():
                return json_response({"status": "success"})
        text = f"{request.method} {request.url.path} is not supported: a gateway has no models of its own."
        raise HttpError(Refusal(501, text, code="unsupported"))

    async def _models(self, path: str, *, every: bool) -> list[dict[str, Any]]:
        """Return the entry of each name, by one ready backend for each model; ``every``: also where there is none."""
        fleet, catalog = self._state.fleet, self._state.catalog
        ready: dict[str, Backend] = {}
        for name in catalog.names():
            served = catalog.served_as(name)
            backend = next((b for b in fleet.serving(served) if b.is_ready), None)
            if backend is not None:
                ready[served] = backend
        backends = list(dict.fromkeys(ready.values()))
        lists = dict(
            zip(backends, await asyncio.gather(*(self._ask(b, path) for b in backends)), strict=True)
        )
        entries = []
        for name in catalog.names():
            served = catalog.served_as(name)
            known = lists[ready[served]] if served in ready else {}
            entry = known.get(served, known.get(served + LATEST, _EMPTY if every else None))
            if entry is not None:
                tagged = name if ":" in name.rpartition("/")[2] else name + LATEST
                entries.append(entry | {"name": tagged, "model": tagged})
        return entries

    async def _ask(self, backend: Backend, path: str) -> dict[str, dict[str, Any]]:
        """Return a backend's list by names; empty where it has none."""
        try:
            answer = await self._state.upstream.get(backend.url + path, ASIDE_TIMEOUT_S, backend.args.api_key)
            models = msgspec.json.decode(answer.body)["models"] if answer.status == 200 else []
            return {model["name"]: model for model in models}
        except (BackendFailed, msgspec.DecodeError, KeyError, TypeError):
            return {}
