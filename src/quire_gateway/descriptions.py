"""`Descriptions`: the GET endpoints that describe models, as a replica that serves the model answers them.

The list of models is made of the cards that polls have brought, under the names that clients may send. The documents
(``/props``, ``/tokenizer_info``, ``/info``, ``/openapi.json``, ``/docs``) are asked of a ready replica of Quire at each
request. Another server's are not relayed: what they say of other requests is not known. What a replica says of running
requests (``/slots``, ``/engine/live``) has no route here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.errors import NotFoundError
from quire.http.call import call_of
from quire.http.json_page import json_response
from quire.http.refusals import HttpError, Refusal, busy
from quire.units import MIB
from quire_gateway.fleet import Backend
from quire_gateway.headers import to_backend
from quire_gateway.patience import lasting
from quire_gateway.state import GatewayState
from quire_gateway.upstream import ASIDE_TIMEOUT_S, BackendFailed, Reply, closing, failures, read_reply

_OWNER = "quire"  # as replicas name themselves in the cards of their models
# Of a card, what concerns the gateway alone: which replicas can continue a stream of one another.
_OWN_FIELDS = ("fingerprint",)


class Descriptions:
    """The handlers."""

    def __init__(self, state: GatewayState, paths: Callable[[], Collection[str]]) -> None:
        """``paths``: those that the gateway serves, which its description describes."""
        self._state = state
        self._paths = paths
        self._started_unix = int(state.unix_time())
        self._page: tuple[int, Reply] | None = None  # life of the backend that gave it

    def routes(self) -> list[Route]:
        get = {
            "/version": self.version,
            "/v1/models": self.models,
            "/v1/models/{model_id:path}": self.model,
            "/props": self.document,
            "/tokenizer_info": self.document,
            "/info": self.document,
            "/openapi.json": self.description,
            "/docs": self.docs,
        }
        return [Route(path, handler, methods=["GET"]) for path, handler in get.items()]

    async def version(self, request: Request) -> Response:
        """The version of Quire."""
        return json_response({"version": __version__})

    async def models(self, request: Request) -> Response:
        """The models that clients may name."""
        cards = [self._card(name) for name in self._state.catalog.names()]
        return json_response({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        """One of them, or 404."""
        name = request.path_params["model_id"]
        self._state.catalog.targets(name)
        return json_response(self._card(name))

    async def document(self, request: Request) -> Response:
        """What a replica says of a model: the query's ``model``, else the default, or the only one."""
        model = self._model(request)
        return _response(await self._ask(request, self._replicas(model), repr(model)))

    async def description(self, request: Request) -> Response:
        """The description of this API: a replica's, without the paths that the gateway does not serve."""
        reply = await self._ask(request, self._any(), "any model")
        if reply.status != 200:
            return _response(reply)
        try:
            fields = msgspec.json.decode(reply.body, type=dict[str, msgspec.Raw])
            described = msgspec.json.decode(fields["paths"], type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeError, KeyError) as error:
            text = f"The replica's /openapi.json is no description: {error}."
            raise HttpError(Refusal(502, text, code="backend_garbage")) from error
        served = {path.replace(":path}", "}") for path in self._paths()}
        described_here = {path: what for path, what in described.items() if path in served}
        fields["paths"] = msgspec.Raw(msgspec.json.encode(described_here))
        return Response(msgspec.json.encode(fields), media_type="application/json")

    async def docs(self, request: Request) -> Response:
        """The same as a page. It needs no key, so that a replica is asked for it once in its life."""
        replicas = self._any()
        if self._page is None or all(backend.life != self._page[0] for backend in replicas):
            reply = await self._ask(request, replicas, "any model")
            if reply.status != 200:
                return _response(reply)
            self._page = replicas[0].life, reply
        return _response(self._page[1])

    def _card(self, name: str) -> dict[str, Any]:
        """Return the entry of a listed name: the card of a backend that serves it, ready ones first."""
        card: dict[str, Any] = {"object": "model", "created": self._started_unix, "owned_by": _OWNER}
        served = self._state.catalog.served_as(name)
        serving = [backend for backend in self._state.fleet.serving(served) if served in backend.cards]
        for backend in sorted(serving, key=lambda b: not b.is_ready)[:1]:
            card |= {k: v for k, v in backend.cards[served].items() if k not in _OWN_FIELDS}
        card = {"id": name} | card | {"id": name}
        return card if self._state.pool is None else card | self._state.pool.named(name).card()

    def _model(self, request: Request) -> str:
        """Return the served name of the model that is asked about. Raises `RequestError` if none can be told."""
        state = self._state
        name = state.catalog.tagged(request.query_params.get("model") or state.config.server.default_model)
        target, key = state.catalog.targets(name)[0].model, call_of(request.scope).key
        model = state.catalog.served_as(name) if name in state.catalog.names() else target
        if key is not None and not key.allows_model(model):
            raise NotFoundError(
                f"The key {key.name!r} may not use the model {model!r}; it may use {', '.join(key.models)}.",
                param="model",
                code="model_not_found",
            )
        return model

    def _replicas(self, model: str) -> list[Backend]:
        """Return the ready replicas of Quire that serve a model; those that an operator drains are the last."""
        ready = [
            backend
            for backend in self._state.fleet.serving(model)
            if backend.is_ready and _is_replica(backend, model)
        ]
        return sorted(ready, key=lambda backend: backend.is_draining)

    def _any(self) -> list[Backend]:
        def replicas() -> Iterator[Backend]:
            for name in self._state.catalog.names():
                yield from self._replicas(self._state.catalog.served_as(name))

        return list(dict.fromkeys(replicas()))

    async def _ask(self, request: Request, replicas: list[Backend], model: str) -> Reply:
        """Return the answer of the first replica that gives one.

        Raises:
            HttpError: 503, none is ready or none answers.
        """
        path = request.scope["path"]
        for backend in replicas:
            try:
                reply = await self._get(request, backend, path)
            except BackendFailed:
                continue
            if reply.status < 500 and reply.status != 429:
                return reply
        text = f"No replica of Quire that serves {model} is ready to answer {path} now: try again."
        raise HttpError(busy(text, "no_backend", 1))

    async def _get(self, request: Request, backend: Backend, path: str) -> Reply:
        state = self._state
        headers = to_backend(
            request.scope,
            call_of(request.scope).request_id,
            backend.args.api_key,
            pass_keys=not state.config.server.checks_keys,
            trace_id=state.new_id(),
        )
        with failures():
            async with lasting(ASIDE_TIMEOUT_S):
                response = await state.upstream.open("GET", backend.url + path, headers, None)
                with closing(response):
                    return await read_reply(response, state.config.server.max_answer_mib * MIB)


def _is_replica(backend: Backend, model: str) -> bool:
    return backend.cards.get(model, {}).get("owned_by") == _OWNER


def _response(reply: Reply) -> Response:
    headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in reply.headers if k == b"content-type"}
    return Response(reply.body, reply.status, headers)
