"""What surrounds every application: request ids and keys, browsers, and errors that reach its router."""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

from quire.errors import QuireError
from quire.http.account import enter_account
from quire.http.body import header, send_json
from quire.http.keys import ApiKey, KeyFile
from quire.http.refusals import Refusal, refusal_of
from quire.http.wire import Body
from quire.metrics.log import Log

# Probes and scrapers send no key, as with vLLM; the two pages have nothing of the model without one.
OPEN_PATHS = frozenset({"/", "/docs", "/livez", "/readyz", "/startupz", "/health", "/version", "/metrics"})
MAX_REQUEST_ID_CHARS = 128
_SCOPE_KEY = "quire.request_id"
_OWN_KEY = "quire.request_id_is_own"
_API_KEY = "quire.api_key"
# The tenant of the request that a task serves: of the key that let it in, here or at its gateway. "": it had none.
TENANT: ContextVar[str] = ContextVar("quire.tenant", default="")
# The tenants of one group share cached blocks. "": the tenant is a group of its own.
CACHE_GROUP: ContextVar[str] = ContextVar("quire.cache_group", default="")
# The line of the key file that let it in: calls of this process, such as a batch's, have its rights.
_KEY: ContextVar[ApiKey | None] = ContextVar("quire.key", default=None)
TENANT_WEIGHT: ContextVar[float] = ContextVar("quire.tenant_weight", default=1.0)
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _SCOPE_KEY in scope:  # a call from this process has a name already
            if scope["type"] == "http" and (key := _KEY.get()) is not None:
                scope[_API_KEY] = key
            await self._app(scope, receive, send)
            return
        given = usable_request_id(header(scope, b"x-request-id"))
        scope[_OWN_KEY] = given is None
        scope[_SCOPE_KEY] = given or self._new_id()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                name = (b"x-request-id", scope[_SCOPE_KEY].encode())
                message["headers"] = [*message.get("headers", ()), name]
            try:
                await send(message)
            except RuntimeError as error:
                if _CLOSED not in str(error):
                    raise

        refusal = None if scope["path"] in OPEN_PATHS else self._key_problem(scope)
        if refusal is not None:
            await send_json(send_named, refusal.status, refusal.body(scope["path"]), refusal.headers)
            return
        account = enter_account(scope, self._gateway_key) if self._gateway_key is not None else None
        if account is not None and account.tenant:
            TENANT.set(account.tenant)
            CACHE_GROUP.set(account.cache_group)
            TENANT_WEIGHT.set(account.weight)
        await self._app(scope, receive, send_named)

    def _key_problem(self, scope: Scope) -> Refusal | None:
        """Return why the request's key does not suffice; None if it does, or if no key is needed."""
        if not self._keys and self._key_file is None:
            return None
        given = _keys_of(scope)
        # Each comparison takes constant time, which reveals neither a length nor where a difference is.
        matches = [hmac.compare_digest(one, key) for one in given for key in self._keys]
        if any(matches):
            return None
        table = self._key_file.table() if self._key_file is not None else None
        found = next((key for one in given if table and (key := table.find(one)) is not None), None)
        if found is None:
            text = (
                "Missing or wrong API key: send the header Authorization: Bearer <key> (or x-api-key: <key>)."
            )
        elif found.is_expired(datetime.now(UTC)):
            text = f"The API key {found.name!r} has expired."
        elif not found.allows_endpoint(scope["path"]):
            allowed = ", ".join(found.endpoints)
            text = f"The API key {found.name!r} may not call {scope['path']}; it may call {allowed}."
            return Refusal(403, text, code="forbidden")
        else:
            scope[_API_KEY] = found
            _KEY.set(found)
            TENANT.set(found.tenant)
            CACHE_GROUP.set(table.group_of(found.tenant) if table is not None else "")
            TENANT_WEIGHT.set(found.weight)
            return None
        return Refusal(401, text, code="invalid_api_key", headers=((b"www-authenticate", b"Bearer"),))


def _keys_of(scope: Scope) -> list[bytes]:
    kind, _, token = (header(scope, b"authorization") or b"").partition(b" ")
    given = [token.strip()] if kind.lower() == b"bearer" else []
    other = header(scope, b"x-api-key")  # the header of Anthropic's clients
    return given if other is None else [*given, other]


def holds_key(scope: Scope, key: str | None) -> bool:
    """Whether a request has ``key``; no request has one that is not set."""
    return key is not None and any(hmac.compare_digest(one, key.encode()) for one in _keys_of(scope))


def kept_owner() -> dict[str, Any]:
    """Return key and tenant of the request that this task serves, for `enter_owner` later: values of JSON."""
    key = _KEY.get()
    rights = None if key is None else {"name": key.name, "models": list(key.models), "weight": key.weight}
    return {"tenant": TENANT.get(), "cache_group": CACHE_GROUP.get(), "key": rights}


def enter_owner(kept: Mapping[str, Any]) -> None:
    """Have this task work for the key and tenant of `kept_owner`, with the models that the key could use then."""
    tenant, rights = kept.get("tenant", ""), kept.get("key")
    TENANT.set(tenant)
    CACHE_GROUP.set(kept.get("cache_group", ""))
    if rights is not None:
        models, epoch = tuple(rights["models"]), datetime.fromtimestamp(0, UTC)
        _KEY.set(ApiKey(rights["name"], tenant, "", epoch, models=models, weight=rights["weight"]))
        TENANT_WEIGHT.set(rights["weight"])


def key_of(scope: Scope) -> ApiKey | None:
    """Return the line of the key file that let the request in."""
    found: ApiKey | None = scope.get(_API_KEY)
    return found


def new_id() -> str:
    """Return 32 hexadecimal digits that no other id gives away: an id may be all that it takes to read an answer.

    One system call per id (0.5 µs) leaves no state in this process that a fork could repeat.
    """
    return os.urandom(16).hex()


def name_scope(scope: Scope, request_id: str) -> None:
    """Name a request that this process makes itself; `Edge` then asks for no key."""
    scope[_SCOPE_KEY] = request_id
    scope[_OWN_KEY] = False


def request_id_of(scope: Scope) -> str:
    """Return the id under which this request is logged and answered."""
    return str(scope.get(_SCOPE_KEY, ""))


def adopt_request_id(scope: Scope, given: str | None) -> None:
    """Take the id from the body (vLLM's ``request_id``, SGLang's ``rid``) unless a header named the request."""
    usable = usable_request_id(given)
    if usable is not None and scope.get(_OWN_KEY, True):
        scope[_SCOPE_KEY] = usable


def usable_request_id(value: Any) -> str | None:
    """Return a client's own request id if it is fit for a header and a log line, else None."""
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    if not isinstance(value, str) or not 0 < len(value) <= MAX_REQUEST_ID_CHARS:
        return None
    return value if value.isascii() and value.isprintable() else None


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
    log.error("request_crashed", request_id=request_id_of(request.scope), error=repr(error))
    return _response(request, refusal_of(error), {})


def _response(request: Request, refusal: Refusal, headers: dict[str, str]) -> Response:
    headers.update({key.decode(): value.decode() for key, value in refusal.headers})
    return Response(refusal.body(request.url.path), refusal.status, headers, "application/json")
