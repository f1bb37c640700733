"""The POST endpoints: read, check, run, answer. One ASGI application per kind of endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from quire.api.generation import CANCELLED_BY_CLIENT, Generation
from quire.api.job import Job
from quire.api.state import ApiState
from quire.errors import QuireError, RequestError
from quire.http.body import Disconnected, read_json, send_json
from quire.http.client import BACKGROUND_KEY, PRIORITY_KEY
from quire.http.edge import adopt_request_id, request_id_of
from quire.http.refusals import refusal_of
from quire.metrics.log import Log
from quire.metrics.trace import trace_headers

log = Log("api")

# (state, body, list that collects unknown names with --lenient, else None) → job
Prepare = Callable[[ApiState, Any, list[str] | None], Awaitable[Job]]
# The same → the JSON value of the answer.
Compute = Callable[[ApiState, Any, list[str] | None], Awaitable[Any]]


class PostEndpoint:
    """An ASGI application for one path: it reads the body under limits, and answers errors in the form of the path."""

    def __init__(self, state: ApiState, path: str) -> None:
        self._state = state
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival_s = self._state.now()
        status = 200
        try:
            body = await read_json(scope, receive, self._state.settings.max_body_bytes)
            await self._run(body, arrival_s, scope, receive, send)
        except Disconnected:
            status = 499  # nginx's number for a client that disconnected; it is only counted
        except Exception as error:
            status = await self._refuse(error, scope, send)
        self._state.metrics.response(self._path, status)

    async def _run(self, body: Any, arrival_s: float, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    def _ignored(self) -> list[str] | None:
        """Return the list that collects unknown names; None refuses them."""
        return [] if self._state.settings.lenient else None

    async def _refuse(self, error: Exception, scope: Scope, send: Send) -> int:
        refusal = refusal_of(error, retry_after_s=self._state.settings.retry_after_s)
        request_id = request_id_of(scope)
        if not isinstance(error, QuireError):
            log.exception("request_crashed", request_id=request_id, path=self._path)
        elif refusal.status >= 500:
            log.error("request_failed", request_id=request_id, status=refusal.status, error=refusal.message)
        elif log.debugging:
            log.debug("request_refused", request_id=request_id, status=refusal.status, error=refusal.message)
        await send_json(send, refusal.status, refusal.body(self._path), refusal.headers)
        return refusal.status


class JsonEndpoint(PostEndpoint):
    """An endpoint that computes one JSON value and runs nothing on the engine."""

    def __init__(self, state: ApiState, path: str, compute: Compute) -> None:
        super().__init__(state, path)
        self._compute = compute

    async def _run(self, body: Any, arrival_s: float, scope: Scope, receive: Receive, send: Send) -> None:
        ignored = self._ignored()
        answer = await self._compute(self._state, body, ignored)
        await send_json(send, 200, msgspec.json.encode(answer), ignored_header(ignored))


class GenerateEndpoint(PostEndpoint):
    """An endpoint that runs a `Job`."""

    def __init__(self, state: ApiState, path: str, prepare: Prepare) -> None:
        super().__init__(state, path)
        self._prepare = prepare

    async def _run(self, body: Any, arrival_s: float, scope: Scope, receive: Receive, send: Send) -> None:
        ignored = self._ignored()
        job = await self._prepare(self._state, body, ignored)
        adopt_request_id(scope, job.client_request_id)
        if scope.get(PRIORITY_KEY) is not None:
            job = replace(job, priority=scope[PRIORITY_KEY])
        trace = trace_headers(scope["headers"]) if self._state.tracer is not None else {}
        generation = Generation(self._state, job, arrival_s, request_id_of(scope), trace)
        if job.in_background and BACKGROUND_KEY not in scope:
            raise RequestError("background = true is not supported by this server.", param="background")
        ids = frozenset((job.answer.head.id, request_id_of(scope)))
        with self._state.running.entered(ids, generation):
            await self._answer(generation, ignored, receive, send)
        if log.debugging:
            log.debug(
                "request_done",
                request_id=request_id_of(scope),
                id=job.answer.head.id,
                prompt_tokens=generation.usage.prompt_tokens,
                cached_tokens=generation.usage.cached_tokens,
                output_tokens=generation.usage.completion_tokens,
                seconds=self._state.now() - arrival_s,
            )

    async def _answer(
        self, generation: Generation, ignored: list[str] | None, receive: Receive, send: Send
    ) -> None:
        watcher: asyncio.Task[None] | None = None
        try:
            if not generation.job.in_background:
                await generation.submit()
            watcher = asyncio.create_task(_watch(receive, generation))
            await generation.answer(send, ignored_header(ignored))
        except QuireError:
            if not generation.disconnected:
                raise
        finally:
            if watcher is not None:
                watcher.cancel()
            await generation.close()
        if generation.disconnected:
            raise Disconnected


def ignored_header(ignored: list[str] | None) -> list[tuple[bytes, bytes]]:
    """Return the header with the names of the fields that ``--lenient`` ignored."""
    if not ignored:
        return []
    return [(b"x-quire-ignored-fields", ", ".join(ignored).encode("ascii", "replace"))]


async def _watch(receive: Receive, generation: Generation) -> None:
    """Wait for the client to disconnect; then abort."""
    while (await receive())["type"] != "http.disconnect":
        continue
    if generation.job.in_background:
        await generation.cancel(CANCELLED_BY_CLIENT)
    else:
        await generation.disconnect()
