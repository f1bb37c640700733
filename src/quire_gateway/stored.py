"""Stored responses: ``/v1/responses/{id}…`` goes to the backend that holds the response."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import quote

from aiohttp import ClientResponse
from starlette.types import Receive, Scope, Send

from quire.http.account import Account
from quire.http.body import send_json
from quire.http.call import call_of
from quire.http.refusals import Refusal
from quire_gateway.exchange import Exchange
from quire_gateway.filtering import Filtering
from quire_gateway.filters import About
from quire_gateway.fleet import Backend
from quire_gateway.headers import to_backend
from quire_gateway.patience import lasting
from quire_gateway.sealed import RESPONSES, Sealing, not_stored
from quire_gateway.state import GatewayState
from quire_gateway.upstream import BackendFailed, Whole, closing, failures, read_whole


class StoredProxy:
    """ASGI: GET, DELETE and cancel of one response, at the backend that holds it; see `Holders`."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, shown = self._state, scope["path_params"]["response_id"]
        tenant = state.tenancy.owner(call_of(scope).tenant)
        response_id, hint = tenant.open(shown), tenant.hint_in(shown)
        if response_id is None:
            raise not_stored(shown)
        likely, others = state.holders.likely(response_id, tenant, hint)
        whole: Whole | None = None
        silent = set(likely)  # those that should hold it and have not answered
        for backend in (b for b in (*likely, *others) if b.is_ready):
            try:
                whole = await _ask(state, scope, backend, _path_of(scope, response_id))
            except BackendFailed:
                continue
            silent.discard(backend)
            if whole.status != 404:
                break
        if whole is None or (whole.status == 404 and silent):
            refusal = Refusal(503, "No backend that may hold the response answers now.", code="no_backend")
            await send_json(send, refusal.status, refusal.body(), [(b"retry-after", b"1")])
            return
        if tenant.seals:
            sealing = Sealing(tenant, {response_id: shown}, hint)
            kind = dict(whole.headers).get(b"content-type", b"")
            is_stream = kind.startswith(b"text/event-stream")
            body = sealing.frames(whole.body) if is_stream else sealing.whole(whole.status, whole.body)
            whole = replace(whole, body=body)
        body = await self._filtered(scope, whole)
        length = (b"content-length", str(len(body)).encode())
        await send(
            {"type": "http.response.start", "status": whole.status, "headers": [*whole.headers, length]}
        )
        await send({"type": "http.response.body", "body": body})

    async def _filtered(self, scope: Scope, whole: Whole) -> bytes:
        """Return the body after the filters, which the replica that stores it does not know."""
        filters, call = self._state.filters, call_of(scope)
        if filters is None or not filters.reads_answers or whole.status != 200:
            return whole.body
        owner = (call.tenant, call.key.name) if call.key is not None else ("", "")
        filtering = Filtering(filters, About(call.request_id, scope["path"], "", *owner))
        if dict(whole.headers).get(b"content-type", b"").startswith(b"text/event-stream"):
            stream = await filtering.end(whole.body)
            filtering.check()
            return stream
        return await filtering.whole(whole.body)


async def holder_of(state: GatewayState, exchange: Exchange) -> str | None:
    """Return the one backend that can take a request, as `Holders.find`."""

    async def has(backend: Backend, response_id: str) -> bool:
        try:
            with failures():
                async with lasting(state.config.health.timeout_s):
                    response = await _open(state, exchange.scope, "GET", backend, _path_at(response_id))
                    with closing(response):
                        return response.status == 200
        except BackendFailed:
            return False

    return await state.holders.find(exchange, state.tenancy.owner(exchange.call.tenant), has)


async def _ask(state: GatewayState, scope: Scope, backend: Backend, path: str) -> Whole:
    query = scope["query_string"].decode("latin-1")
    config = state.config
    with failures():
        async with lasting(config.timeouts.total_s):
            response = await _open(
                state, scope, scope["method"], backend, f"{path}{'?' + query if query else ''}"
            )
            with closing(response):
                return await read_whole(response, config.server.max_answer_mib << 20)


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


def _path_of(scope: Scope, response_id: str) -> str:
    """Return the path at a backend: the client's, with the backend's id."""
    shown, raw = scope["path_params"]["response_id"], scope["raw_path"].decode("latin-1")
    if response_id == shown:
        return str(raw)
    rest: str = scope["path"].removeprefix(f"{RESPONSES}/{shown}")
    return _path_at(response_id) + rest
