"""What surrounds every application: request ids and keys, browsers, and errors that reach its router."""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

from quire.errors import QuireError
from quire.http.account import is_second, read_account
from quire.http.body import header, send_json
from quire.http.call import SCOPE_KEY, Call, call_of, put_call, usable_request_id
from quire.http.refusals import HttpError, Refusal, refusal_of
from quire.http.wire import Body
from quire.metrics.log import Log

if TYPE_CHECKING:
    from quire.http.keys import KeyFile

# Probes and scrapers send no key, as with vLLM; the two pages have nothing of the model without one.
OPEN_PATHS = frozenset({"/", "/docs", "/livez", "/readyz", "/startupz", "/health", "/version", "/metrics"})
log = Log("api")


@dataclass(frozen=True, slots=True)
class Extension:
    """What another package adds to an application."""

    routes: Sequence[Route] = ()
    # (path, what wraps the application of each of the application's own routes at that path and below it)
    around: tuple[str, Callable[[ASGIApp], ASGIApp]] | None = None
    lifespan: Lifespan[Starlette] | None = None  # runs beside the application
    bodies: Mapping[str, Body] = field(default_factory=dict)  # of the routes, by path
    work: Work | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """What an extension does by itself, and another server can go on with."""

    start: Callable[[Starlette], None]  # with the application that it calls
    stop: Callable[[], Awaitable[list[Any]]]  # and return what is not on disk
    adopt: Callable[[list[Any]], None]  # before the start: what another server has returned
    is_on_disk: bool  # a server that starts later goes on with it, too


# uvloop, between a client's reset and the disconnect that the application sees: what is sent then is dropped.
_CLOSED = "the handler is closed"


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
        self._gateway_key = gateway_key
        self._key_file = key_file
        self._new_id = new_id
        self._keys = [key.encode() for key in api_keys]
        self._has_keys = bool(api_keys) or key_file is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or SCOPE_KEY in scope:
            await self._app(scope, receive, send)
            return
        given: Any = header(scope, b"x-request-id")
        if given is not None:
            given = usable_request_id(given)
        call = scope[SCOPE_KEY] = Call(given or self._new_id(), draws_id=given is None)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                name = (b"x-request-id", scope[SCOPE_KEY].request_id.encode())
                message["headers"] = [*message.get("headers", ()), name]
            try:
                await send(message)
            except RuntimeError as error:
                if _CLOSED not in str(error):
                    raise

        try:
            if self._has_keys and scope["path"] not in OPEN_PATHS:
                call = put_call(scope, self._with_key(call, scope))
        except HttpError as error:
            refusal = error.refusal
            await send_json(send_named, refusal.status, refusal.body(scope["path"]), refusal.headers)
            return
        if self._gateway_key is not None:
            put_call(scope, self._with_account(call, scope, self._gateway_key))
        await self._app(scope, receive, send_named)

    def _with_account(self, call: Call, scope: Scope, gateway_key: str) -> Call:
        """Return the call as a gateway with the key says for whom it runs."""
        account = read_account(scope, gateway_key)
        if account is None:
            return call
        if not is_second(scope):
            call = replace(call, account=account)
        if not account.tenant:
            return call
        return replace(call, tenant=account.tenant, cache_group=account.cache_group, weight=account.weight)

    def _with_key(self, call: Call, scope: Scope) -> Call:
        """Return the call with the rights of the request's key.

        Raises:
            HttpError: the request's key does not suffice.
        """
        given = _keys_of(scope)
        # Each comparison takes constant time, which reveals neither a length nor where a difference is.
        matches = [hmac.compare_digest(one, key) for one in given for key in self._keys]
        if any(matches):
            return call
        table = self._key_file.table() if self._key_file is not None else None
        found = next((key for one in given if table and (key := table.find(one)) is not None), None)
        if found is None or table is None:
            text = (
                "Missing or wrong API key: send the header Authorization: Bearer <key> (or x-api-key: <key>)."
            )
        elif found.is_expired(datetime.now(UTC)):
            text = f"The API key {found.name!r} has expired."
        elif not found.allows_endpoint(scope["path"]):
            allowed = ", ".join(found.endpoints)
            text = f"The API key {found.name!r} may not call {scope['path']}; it may call {allowed}."
            raise HttpError(Refusal(403, text, code="forbidden"))
        else:
            group = table.group_of(found.tenant)
            return replace(call, key=found, tenant=found.tenant, cache_group=group, weight=found.weight)
        challenge = ((b"www-authenticate", b"Bearer"),)
        raise HttpError(Refusal(401, text, code="invalid_api_key", headers=challenge))


def _keys_of(scope: Scope) -> list[bytes]:
    kind, _, token = (header(scope, b"authorization") or b"").partition(b" ")
    given = [token.strip()] if kind.lower() == b"bearer" else []
    other = header(scope, b"x-api-key")  # the header of Anthropic's clients
    return given if other is None else [*given, other]


def holds_key(scope: Scope, key: str | None) -> bool:
    """Whether a request has ``key``; no request has one that is not set."""
    return key is not None and any(hmac.compare_digest(one, key.encode()) for one in _keys_of(scope))


def new_id() -> str:
    """Return 32 hexadecimal digits that no other id gives away: an id may be all that it takes to read an answer.

    One system call per id (0.5 µs) leaves no state in this process that a fork could repeat.
    """
    return os.urandom(16).hex()


def error_handlers(count: Callable[[int], None]) -> dict[Any, Any]:
    """Return handlers for errors that reach a router: unknown paths and methods, and exceptions of handlers.

    The answers have the form that clients of the path expect. ``count`` is told the status of the router's own errors.
    """

    async def router_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, method = request.url.path, request.method
        if error.status_code == 404:
            served = ", ".join(sorted({r.path for r in request.app.router.routes}))
            refusal = Refusal(404, f"There is no {path} here. Paths: {served}.", code="unknown_path")
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            text = f"{method} is not allowed on {path}; allowed: {allowed}."
            refusal = Refusal(405, text, code="method_not_allowed")
        else:
            refusal = Refusal(error.status_code, str(error.detail))
        count(refusal.status)
        return _response(request, refusal, dict(error.headers or {}))

    return {HTTPException: router_error, QuireError: _quire_error, Exception: _crash}


async def _quire_error(request: Request, error: Exception) -> Response:
    return _response(request, refusal_of(error), {})


async def _crash(request: Request, error: Exception) -> Response:
    log.error("request_crashed", request_id=call_of(request.scope).request_id, error=repr(error))
    return _response(request, refusal_of(error), {})


def _response(request: Request, refusal: Refusal, headers: dict[str, str]) -> Response:
    headers.update({key.decode(): value.decode() for key, value in refusal.headers})
    return Response(refusal.body(request.url.path), refusal.status, headers, "application/json")
