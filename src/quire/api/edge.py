"""What every request passes first: a request id, and the key."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.api.body import header, send_json
from quire.api.refusals import Refusal

# Probes and scrapers come without a key, as with vLLM.
OPEN_PATHS = frozenset({"/livez", "/readyz", "/startupz", "/health", "/version", "/metrics"})
MAX_REQUEST_ID_CHARS = 128
_SCOPE_KEY = "quire.request_id"
_OWN_KEY = "quire.request_id_is_own"


class Edge:
    """ASGI middleware: names the request (``x-request-id``, the client's own if it sent one) and checks its key."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], new_id: Callable[[], str]) -> None:
        self._app = app
        self._new_id = new_id
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = usable_request_id(header(scope, b"x-request-id"))
        scope[_OWN_KEY] = given is None
        scope[_SCOPE_KEY] = given or self._new_id()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                name = (b"x-request-id", scope[_SCOPE_KEY].encode())
                message["headers"] = [*message.get("headers", ()), name]
            await send(message)

        if self._keys and scope["path"] not in OPEN_PATHS and not self._knows(scope):
            refusal = Refusal(
                401,
                "Missing or wrong API key: send the header Authorization: Bearer <key> (or x-api-key: <key>).",
                code="invalid_api_key",
                headers=((b"www-authenticate", b"Bearer"),),
            )
            await send_json(send_named, refusal.status, refusal.body(scope["path"]), refusal.headers)
            return
        await self._app(scope, receive, send_named)

    def _knows(self, scope: Scope) -> bool:
        """Compare with every key in constant time; neither the length nor the position of a difference shows."""
        kind, _, token = (header(scope, b"authorization") or b"").partition(b" ")
        given = [token.strip()] if kind.lower() == b"bearer" else []
        other = header(scope, b"x-api-key")  # where Anthropic's clients have it
        if other is not None:
            given.append(other)
        matches = [hmac.compare_digest(one, key) for one in given for key in self._keys]
        return any(matches)


def name_scope(scope: Scope, request_id: str) -> None:
    """Name a request that comes from this process itself."""
    scope[_SCOPE_KEY] = request_id
    scope[_OWN_KEY] = False


def request_id_of(scope: Scope) -> str:
    """Return the id under which this request is logged and answered."""
    return str(scope.get(_SCOPE_KEY, ""))


def adopt_request_id(scope: Scope, given: str | None) -> None:
    """Take the id from the body (vLLM's ``request_id``, SGLang's ``rid``) where no header named the request."""
    usable = usable_request_id(given)
    if usable is not None and scope.get(_OWN_KEY, True):
        scope[_SCOPE_KEY] = usable


def usable_request_id(value: Any) -> str | None:
    """Return a client's own request id if it can stand in a header and a log line, else None."""
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    if not isinstance(value, str) or not 0 < len(value) <= MAX_REQUEST_ID_CHARS:
        return None
    return value if value.isascii() and value.isprintable() else None
