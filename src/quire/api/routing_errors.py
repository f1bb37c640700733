"""What an app answers to errors that reach its router: unknown paths and methods, and exceptions of handlers."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from quire.api.edge import request_id_of
from quire.api.refusals import Refusal, refusal_of
from quire.api.state import ApiState
from quire.errors import QuireError
from quire.metrics.log import Log

log = Log("api")


def add_error_handlers(app: FastAPI) -> None:
    """Answer all of them in the form that clients of the path expect."""
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(QuireError, _quire_error)
    app.add_exception_handler(Exception, _crash)


async def _http_exception(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    state: ApiState = request.app.state.quire
    if error.status_code == 404:
        served = ", ".join(sorted({r.path for r in request.app.router.routes}))
        refusal = Refusal(404, f"There is no {path} here. Paths: {served}.", code="unknown_path")
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        refusal = Refusal(
            405, f"{method} is not allowed on {path}; allowed: {allowed}.", code="method_not_allowed"
        )
    else:
        refusal = Refusal(error.status_code, str(error.detail))
    state.metrics.response("other", refusal.status)
    return _response(request, refusal, dict(error.headers or {}))


async def _quire_error(request: Request, error: Exception) -> Response:
    return _response(request, refusal_of(error), {})


async def _crash(request: Request, error: Exception) -> Response:
    log.error("request_crashed", request_id=request_id_of(request.scope), error=repr(error))
    return _response(request, refusal_of(error), {})


def _response(request: Request, refusal: Refusal, headers: dict[str, str]) -> Response:
    headers.update({key.decode(): value.decode() for key, value in refusal.headers})
    return Response(refusal.body(request.url.path), refusal.status, headers, "application/json")
