"""Answers for errors that reach a router: unknown paths and methods, exceptions of handlers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import QuireError
from quire.http.call import call_of
from quire.http.refusals import Refusal, as_refusal
from quire.metrics.log import Log

log = Log("api")


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
    return _response(request, as_refusal(error), {})


async def _crash(request: Request, error: Exception) -> Response:
    log.error("request_crashed", request_id=call_of(request.scope).request_id, error=repr(error))
    return _response(request, as_refusal(error), {})


def _response(request: Request, refusal: Refusal, headers: dict[str, str]) -> Response:
    headers.update({key.decode(): value.decode() for key, value in refusal.headers})
    return Response(refusal.body(request.url.path), refusal.status, headers, "application/json")
