"""`Stages`: which wrappers of the application a request passes, and the one list of them.

    BrowserGuard, CORS   it names an origin, a site, or a host that is not allowed; or it is a WebSocket
    WebSockets           it is one
    HeldBodies           its body is longer than `SHORT_BYTES`, coded, or of unknown length

A request that needs one of them passes all; any other passes none. They are imported with the first that does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

if TYPE_CHECKING:
    from quire.http.browser_guard import BrowserRules

# A connection's own buffer holds as much that was not read yet, so the sum of bodies so short needs no bound.
SHORT_BYTES = 2**16
MAX_HOSTS = 64  # kept
_ASKS = frozenset({b"origin", b"sec-fetch-site", b"content-encoding", b"transfer-encoding"})
_DIGITS = 5


class Stages:
    """ASGI middleware, the outermost one."""

    def __init__(self, app: ASGIApp, rules: BrowserRules) -> None:
        self._app = app
        self._rules = rules
        self._hosts: set[bytes] = set()  # allowed values of Host
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
        """Return the application in all stages."""
        from quire.http.browser_guard import guarded
        from quire.http.held_bytes import HeldBodies
        from quire.http.websocket import WebSockets

        if self._staged is None:
            self._staged = guarded(WebSockets(HeldBodies(self._app)), self._rules)
        return self._staged
