"""``POST /v1/models/load`` and ``/v1/models/unload`` of a gateway with a `ModelPool`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from quire.http.body import read_json
from quire.http.browser_guard import NoBrowsers
from quire.http.edge import Edge, new_id
from quire.http.json_page import json_response
from quire.http.limits import INLINE_BYTES
from quire.http.refusals import HttpError, Refusal
from quire.http.router_errors import error_handlers
from quire.http.wire import Text, Wire, parse
from quire_gateway.model_pool import ModelPool, PooledModel

MODEL_PATHS = ("/v1/models/load", "/v1/models/unload")
_CLOSED = Refusal(
    403,
    "Clients need a key here, so loading models needs one of its own: start with --admin-key.",
    code="closed",
)


class NamedModel(Wire):
    """Body of both."""

    model: Text


def model_app(pool: ModelPool, count: Callable[[int], None]) -> ASGIApp:
    """Return the application of both paths. With keys for clients and none for operators it refuses every request."""

    def answers(change: Callable[[str], Awaitable[PooledModel]]) -> Callable[[Request], Awaitable[Response]]:
        async def handler(request: Request) -> Response:
            if pool.is_closed:
                raise HttpError(_CLOSED)
            body = parse(NamedModel, await read_json(request.scope, request.receive, INLINE_BYTES))
            model = await change(body.model)
            return json_response({"id": model.name, "object": "model", **model.card()})

        return handler

    changes = zip(MODEL_PATHS, (pool.load, pool.unload), strict=True)
    return Starlette(
        routes=[Route(path, answers(change), methods=["POST"]) for path, change in changes],
        middleware=[Middleware(NoBrowsers), Middleware(Edge, api_keys=pool.keys, new_id=new_id)],
        exception_handlers=error_handlers(count),
    )
