"""Probes, /version, /metrics and /v1/models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from quire.api.state import ApiState
from quire.http.body import json_response

Handler = Callable[[Request], Awaitable[Response]]


class Probes:
    """GET endpoints that report the state of the server: ``starting`` → ``ready`` → ``draining`` or ``dead``.

    ``/livez`` tells of this process, ``/readyz`` of the engine, too: ``restarting``, ``hung`` or ``unsound``. The body
    of each probe is ``{"status": …}``; where the engine is at fault, with ``reason``, ``restarts`` and ``retry_in_s``.
    """

    def __init__(self, state: ApiState) -> None:
        self._state = state

    async def livez(self, request: Request) -> Response:
        """200 until the engine is dead for good; 503 then, when only a restart of this process helps."""
        return self._status(self._state.frontend.state != "dead")

    async def startupz(self, request: Request) -> Response:
        """200 once the model is loaded."""
        return self._status(self._state.frontend.state in ("ready", "draining"))

    async def readyz(self, request: Request) -> Response:
        """200 if a new request would be computed at once; 503 while loading, draining, restarting, hung or dead."""
        frontend = self._state.frontend
        if frontend.state == "ready":
            health = frontend.health()
            if health.status != "ready":
                return json_response(
                    {
                        "status": health.status,
                        "reason": health.reason,
                        "restarts": health.num_restarts,
                        "retry_in_s": round(health.retry_in_s, 3),
                    },
                    503,
                )
        return self._status(frontend.state == "ready")

    async def health(self, request: Request) -> Response:
        """200 while the engine works, 503 otherwise (vLLM's probe)."""
        return self._status(self._state.frontend.state in ("ready", "draining"))

    async def answers(self) -> dict[str, Response]:
        """Return the answers now, for the process that gives them (`quire.http.front`)."""
        request = Request({"type": "http"})
        return {
            "/livez": await self.livez(request),
            "/readyz": await self.readyz(request),
            "/startupz": await self.startupz(request),
            "/health": await self.health(request),
        }

    async def version(self, request: Request) -> Response:
        """The version of Quire."""
        return json_response({"version": self._state.settings.version})

    async def metrics(self, request: Request) -> Response:
        """Metrics in Prometheus's text form, or OpenMetrics."""
        body, content_type = self._state.metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    def _status(self, good: bool) -> Response:
        return json_response({"status": self._state.frontend.state}, 200 if good else 503)


class Models:
    """``/v1/models`` and ``/v1/models/{id}``."""

    def __init__(self, state: ApiState) -> None:
        self._state = state

    async def listed(self, request: Request) -> Response:
        """The models and adapters served."""
        data = [self._card(name) for name in (*self._state.model.names, *self._state.adapter_names)]
        return json_response({"object": "list", "data": data})

    async def one(self, request: Request) -> Response:
        """One of them, or 404."""
        return json_response(self._card(self._state.check_model(request.path_params["model_id"])))

    def _card(self, name: str) -> dict[str, object]:
        """Return the entry of a name as vLLM does: an adapter's root is its path, its parent the model."""
        adapter, base = self._state.adapter_of(name), self._state.model.names[0]
        return {
            "id": name,
            "object": "model",
            "created": self._state.started_unix,
            "owned_by": "quire",
            "root": base if adapter is None else adapter.path,
            "parent": None if adapter is None else base,
            "max_model_len": self._state.model.max_model_len,
            "fingerprint": self._state.continuable_with(name),
        }
