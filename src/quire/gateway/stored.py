"""Stored responses: ``/v1/responses/{id}…`` goes to the backend that holds the response."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from urllib.parse import quote

from starlette.types import Receive, Scope, Send

from quire.gateway.filtering import Filtering
from quire.gateway.filters import About
from quire.gateway.fleet import Backend
from quire.gateway.headers import to_backend
from quire.gateway.sealed import RESPONSES, Sealing, not_stored
from quire.gateway.state import GatewayState
from quire.gateway.upstream import BackendFailed, Whole, closing, failures, read_whole
from quire.http.account import Account
from quire.http.body import send_json
from quire.http.edge import key_of, request_id_of
from quire.http.refusals import Refusal


class StoredProxy:
    """ASGI: GET, DELETE and cancel of one response. Where the owner is not known, every backend is asked."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant, shown = self._state.tenancy.owner(), scope["path_params"]["response_id"]
        response_id = tenant.open(shown)
        if response_id is None:
            raise not_stored(shown)
        owner = self._state.owners.get(response_id)
        backends = [b for b in self._state.fleet if b.is_ready and owner in (None, b.name)]
        whole: Whole | None = None
        for backend in backends:
            try:
                whole = await self._ask(scope, backend, _path_of(scope, response_id))
            except BackendFailed:
                continue
            if whole.status != 404:
                break
        if whole is None:
            refusal = Refusal(503, "No backend that may hold the response answers now.", code="no_backend")
            await send_json(send, refusal.status, refusal.body(), [(b"retry-after", b"1")])
            return
        if tenant.seals:
            sealing, kind = (
                Sealing(tenant, {response_id: shown}),
                dict(whole.headers).get(b"content-type", b""),
            )
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
        filters, key = self._state.filters, key_of(scope)
        if filters is None or not filters.reads_answers or whole.status != 200:
            return whole.body
        owner = (key.tenant, key.name) if key is not None else ("", "")
        filtering = Filtering(filters, About(request_id_of(scope), scope["path"], "", *owner))
        if dict(whole.headers).get(b"content-type", b"").startswith(b"text/event-stream"):
            stream = await filtering.end(whole.body)
            filtering.check()
            return stream
        return await filtering.whole(whole.body)

    async def _ask(self, scope: Scope, backend: Backend, path: str) -> Whole:
        config = self._state.config
        headers = to_backend(
            scope,
            request_id_of(scope),
            backend.args.api_key,
            pass_keys=not config.server.checks_keys,
            trace_id=self._state.new_id(),
        )
        owner, gateway_key = key_of(scope), self._state.key_of(backend)
        if (
            gateway_key is not None and backend.fingerprints and owner is not None
        ):  # replicas keep tenants apart
            account = Account(self._state.new_id(), owner.tenant, owner.name, owner.weight)
            headers += [("x-quire-gateway-key", gateway_key), *account.headers()]
        query = scope["query_string"].decode("latin-1")
        url = f"{backend.url}{path}{'?' + query if query else ''}"
        with failures():
            async with asyncio.timeout(config.timeouts.total_s):
                response = await self._state.upstream.open(scope["method"], url, headers, None)
                with closing(response):
                    return await read_whole(response, config.server.max_answer_mib << 20)


def _path_of(scope: Scope, response_id: str) -> str:
    """Return the path at a backend: the client's, with the backend's id."""
    shown, raw = scope["path_params"]["response_id"], scope["raw_path"].decode("latin-1")
    if response_id == shown:
        return str(raw)
    return f"{RESPONSES}/{quote(response_id, safe='')}{scope['path'].removeprefix(f'{RESPONSES}/{shown}')}"
