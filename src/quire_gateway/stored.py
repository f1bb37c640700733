"""Stored responses: ``/v1/responses/{id}…`` goes to the backend that holds the response."""

from __future__ import annotations

from urllib.parse import quote

from aiohttp import ClientResponse
from starlette.types import Receive, Scope, Send

from quire.errors import NotFoundError, clip
from quire.http.account import Account
from quire.http.body import send_json
from quire.http.call import call_of
from quire.http.refusals import Refusal
from quire_gateway.exchange import Exchange
from quire_gateway.fleet import Backend
from quire_gateway.headers import to_backend
from quire_gateway.ownership import NAMING_PATHS, RESPONSES
from quire_gateway.patience import lasting
from quire_gateway.sending import Opened
from quire_gateway.stage import Proceed, Stage
from quire_gateway.state import GatewayState
from quire_gateway.upstream import BackendFailed, Reply, closing, failures, read_reply


class StoredProxy:
    """ASGI: GET, DELETE and cancel of one response, at the backend that holds it; see `Holders`."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, shown_id = self._state, scope["path_params"]["response_id"]
        tenant = state.tenancy.owner(call_of(scope).tenant)
        response_id, hint = tenant.open(shown_id), tenant.hint_in(shown_id)
        if response_id is None:
            raise NotFoundError(
                f"The response {clip(shown_id)} is not stored here.",
                param="response_id",
                code="response_not_found",
            )
        likely, others = state.holders.likely(response_id, tenant, hint)
        reply: Reply | None = None
        silent = set(likely)  # those that should hold it and have not answered
        for backend in (b for b in (*likely, *others) if b.is_ready):
            try:
                reply = await _ask(state, scope, backend, _backend_path(scope, response_id))
            except BackendFailed:
                continue
            silent.discard(backend)
            if reply.status != 404:
                break
        if reply is None or (reply.status == 404 and silent):
            refusal = Refusal(503, "No backend that may hold the response answers now.", code="no_backend")
            await send_json(send, refusal.status, refusal.body(), [(b"retry-after", b"1")])
            return
        kind = dict(reply.headers).get(b"content-type", b"").decode("latin-1")
        is_stream, body = reply.status == 200 and kind.startswith("text/event-stream"), reply.body
        for step in state.stages.stored_steps(scope, tenant, {response_id: shown_id}, hint):
            body = await (step.ended(body) if is_stream else step.document(reply.status, kind, body))
            step.check()
        length = (b"content-length", str(len(body)).encode())
        await send(
            {"type": "http.response.start", "status": reply.status, "headers": [*reply.headers, length]}
        )
        await send({"type": "http.response.body", "body": body})


class Responses(Stage):
    """A request that goes on with a stored response goes to the backend that holds it."""

    paths = NAMING_PATHS

    def __init__(self, state: GatewayState) -> None:
        self._state = state

    async def serve(self, exchange: Exchange, proceed: Proceed) -> None:
        state = self._state

        async def has(backend: Backend, response_id: str) -> bool:
            try:
                with failures():
                    async with lasting(state.config.health.timeout_s):
                        response = await _open(state, exchange.scope, "GET", backend, _path_at(response_id))
                        with closing(response):
                            return response.status == 200
            except BackendFailed:
                return False

        owner = state.tenancy.owner(exchange.call.tenant)
        exchange.attempts.holder = await state.holders.find(exchange, owner, has)
        await proceed()

    def answered(self, exchange: Exchange, opened: Opened) -> None:
        """Remember where the response is stored."""
        if exchange.path == RESPONSES and exchange.usage.answer_id is not None:
            self._state.holders.put(exchange.usage.answer_id, opened.placed.backend.name)


async def _ask(state: GatewayState, scope: Scope, backend: Backend, path: str) -> Reply:
    query = scope["query_string"].decode("latin-1")
    config = state.config
    with failures():
        async with lasting(config.timeouts.total_s):
            response = await _open(
                state, scope, scope["method"], backend, f"{path}{'?' + query if query else ''}"
            )
            with closing(response):
                return await read_reply(response, config.server.max_answer_mib << 20)


async def _open(
    state: GatewayState, scope: Scope, method: str, backend: Backend, path: str
) -> ClientResponse:
    """Ask a backend for what it stores for the client of ``scope``; the caller closes the answer."""
    headers = to_backend(
        scope,
        call_of(scope).request_id,
        backend.args.api_key,
        pass_keys=not state.config.server.checks_keys,
        trace_id=state.new_id(),
    )
    owner, gateway_key = call_of(scope).key, state.key_of(backend)
    if gateway_key is not None and backend.fingerprints and owner is not None:  # replicas keep tenants apart
        account = Account(state.new_id(), owner.tenant, owner.name, owner.weight)
        headers += [("x-quire-gateway-key", gateway_key), *account.headers()]
    return await state.upstream.open(method, backend.url + path, headers, None)


def _path_at(response_id: str) -> str:
    return f"{RESPONSES}/{quote(response_id, safe='')}"


def _backend_path(scope: Scope, response_id: str) -> str:
    """Return the path at a backend: the client's, with the backend's id."""
    shown_id, raw = scope["path_params"]["response_id"], scope["raw_path"].decode("latin-1")
    if response_id == shown_id:
        return str(raw)
    rest: str = scope["path"].removeprefix(f"{RESPONSES}/{shown_id}")
    return _path_at(response_id) + rest
