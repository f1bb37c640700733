"""Stored responses: ``/v1/responses/{id}…`` goes to the backend that holds the response."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope, Send

from quire.gateway.fleet import Backend
from quire.gateway.headers import to_backend
from quire.gateway.state import GatewayState
from quire.gateway.upstream import BackendFailed, Whole, closing, failures, read_whole
from quire.http.body import send_json
from quire.http.edge import request_id_of
from quire.http.refusals import Refusal


class StoredProxy:
    """ASGI: GET, DELETE and cancel of one response. Where the owner is not known, every backend is asked."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner = self._state.owners.get(scope["path_params"]["response_id"])
        backends = [b for b in self._state.fleet if b.is_ready and owner in (None, b.name)]
        whole: Whole | None = None
        for backend in backends:
            try:
                whole = await self._ask(scope, backend)
            except BackendFailed:
                continue
            if whole.status != 404:
                break
        if whole is None:
            refusal = Refusal(503, "No backend that may hold the response answers now.", code="no_backend")
            await send_json(send, refusal.status, refusal.body(), [(b"retry-after", b"1")])
            return
        length = (b"content-length", str(len(whole.body)).encode())
        await send(
            {"type": "http.response.start", "status": whole.status, "headers": [*whole.headers, length]}
        )
        await send({"type": "http.response.body", "body": whole.body})

    async def _ask(self, scope: Scope, backend: Backend) -> Whole:
        config = self._state.config
        headers = to_backend(
            scope, request_id_of(scope), backend.args.api_key, pass_keys=not config.server.checks_keys
        )
        query = scope["query_string"].decode("latin-1")
        url = f"{backend.url}{scope['raw_path'].decode('latin-1')}{'?' + query if query else ''}"
        with failures():
            async with asyncio.timeout(config.timeouts.total_s):
                response = await self._state.upstream.open(scope["method"], url, headers, None)
                with closing(response):
                    return await read_whole(response, config.server.max_answer_mib << 20)
