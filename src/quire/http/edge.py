"""What surrounds every application: `Stages`, the wrappers that few requests pass, and `Edge`, names and keys.

    BrowserGuard, CORS   the request names an origin, a site, or a host that is not allowed; or is a WebSocket
    WebSockets           it is one
    HeldBodies           its body is longer than `SHORT_BYTES`, coded, or of unknown length

A request that needs one of these wrappers passes all of them; any other passes none. They are imported with the first
request that does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from quire.http.body import header, send_json
from quire.http.call import SCOPE_KEY, Call, put_call, usable_request_id
from quire.http.refusals import HttpError
from quire.http.rights import Rights

if TYPE_CHECKING:
    from quire.http.browser_guard import BrowserRules
    from quire.http.keys import KeyFile

# A connection's own buffer holds as much that was not read yet, so the sum of bodies so short needs no bound.
SHORT_BYTES = HIGH_WATER_LIMIT
MAX_HOSTS = 64  # allowed values that are remembered
_ASKS = frozenset({b"origin", b"sec-fetch-site", b"content-encoding", b"transfer-encoding"})
_DIGITS = len(str(SHORT_BYTES))
# uvloop, between a client's reset and the disconnect that the application sees: what is sent then is dropped.
_CLOSED = "the handler is closed"


class Stages:
    """ASGI middleware, the outermost one: the one list of the wrappers, and which requests pass them."""

    def __init__(self, app: ASGIApp, rules: BrowserRules) -> None:
        self._app = app
        self._rules = rules
        self._hosts: set[bytes] = set()
        self._staged: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_plain = scope["type"] != "websocket"
        for name, value in scope["headers"] if scope["type"] == "http" else ():
            if name == b"content-length":
                is_short = len(value) <= _DIGITS and value.isdigit() and int(value) <= SHORT_BYTES
                is_plain = is_plain and is_short
            elif name in _ASKS or (name == b"host" and value not in self._hosts and not self._allows(value)):
                is_plain = False
        if is_plain:
            await self._app(scope, receive, send)
        else:
            await self._with_all()(scope, receive, send)

    def _allows(self, host: bytes) -> bool:
        """Whether a value of Host is allowed; it is then known."""
        is_allowed = self._rules.allows_host(host.decode("latin-1"))
        if is_allowed and len(self._hosts) < MAX_HOSTS:
            self._hosts.add(host)
        return is_allowed

    def _with_all(self) -> ASGIApp:
        """Return the application in all wrappers."""
        from quire.http.browser_guard import guarded
        from quire.http.held_bytes import HeldBodies
        from quire.http.websocket import WebSockets

        if self._staged is None:
            self._staged = guarded(WebSockets(HeldBodies(self._app)), self._rules)
        return self._staged


class Edge:
    """ASGI middleware: names the request (``x-request-id``, the client's own if it sent one) and checks its key."""

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Sequence[str],
        new_id: Callable[[], str],
        key_file: KeyFile | None = None,
        gateway_key: str | None = None,
    ) -> None:
        self._app = app
        self._new_id = new_id
        self._rights: Rights | None = None
        if api_keys or key_file is not None or gateway_key is not None:
            self._rights = Rights(api_keys, key_file, gateway_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or SCOPE_KEY in scope:
            await self._app(scope, receive, send)
            return
        request_id: Any = header(scope, b"x-request-id")
        if request_id is not None:
            request_id = usable_request_id(request_id)
        call = scope[SCOPE_KEY] = Call(request_id or self._new_id(), draws_id=request_id is None)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                name = (b"x-request-id", scope[SCOPE_KEY].request_id.encode())
                message["headers"] = [*message.get("headers", ()), name]
            try:
                await send(message)
            except RuntimeError as error:
                if _CLOSED not in str(error):
                    raise

        if self._rights is not None:
            try:
                put_call(scope, self._rights.of(call, scope))
            except HttpError as error:
                refusal = error.refusal
                await send_json(send_named, refusal.status, refusal.body(scope["path"]), refusal.headers)
                return
        await self._app(scope, receive, send_named)


def new_id() -> str:
    """Return 32 hexadecimal digits that no other id gives away: an id may be all that it takes to read an answer.

    One system call per id (0.5 µs) leaves no state in this process that a fork could repeat.
    """
    return os.urandom(16).hex()
