"""The POST endpoints: read, check, run, answer. One ASGI application per kind of endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.types import Receive, Scope, Send

from quire.api.generation import CANCELLED_BY_CLIENT, Generation
from quire.api.job import Job
from quire.api.state import ApiState
from quire.errors import NotFoundError, QuireError, RequestError
from quire.http.body import HELD_BODY, Disconnected, decode_body, read_pieces, send_json
from quire.http.call import Call, adopt_request_id, call_of
from quire.http.refusals import refusal_of
from quire.http.wire import Ignored
from quire.metrics.log import Log
from quire.metrics.trace import trace_headers

if TYPE_CHECKING:
    from quire.api.passage import Passage

log = Log("api")

# (state, call, body, what collects ignored fields and judges unknown names) → job
Prepare = Callable[[ApiState, Call, Any, list[str] | None], Awaitable[Job]]
# The same → the JSON value of the answer.
Compute = Callable[[ApiState, Call, Any, list[str] | None], Awaitable[Any]]


class CallStage:
    """Base of the stages of a call: what each may do. `quire.api.app` has the list of those that are on."""

    def has_its_place(self, scope: Scope) -> bool:
        """Whether a full queue does not refuse the request."""
        return False

    def form_bytes(self, scope: Scope) -> int:
        """Return by how much the request's body may be longer."""
        return 0

    async def run(
        self,
        endpoint: GenerateEndpoint,
        body: Any,
        arrival_s: float,
        scope: Scope,
        client: Client,
        send: Send,
    ) -> bool:
        """Answer the request by `GenerateEndpoint.generate`, in some way of its own; False: it has not."""
        return False

    def telling(self, send: Send, scope: Scope, body: Any, generation: Generation) -> Send:
        """Return the `send` of the request's answer."""
        return send

    def ended(self, path: str, generation: Generation, seconds: float) -> None:
        """The request has ended."""


class PostEndpoint:
    """An ASGI application for one path: it reads the body under limits, and answers errors in the form of the path."""

    has_body = True
    is_refused_when_full = False

    def __init__(self, state: ApiState, path: str, stages: Sequence[CallStage] = ()) -> None:
        self.state = state
        self.stages = stages
        self.path = path
        self._judged = Ignored.of(lenient=state.settings.lenient, strict=state.settings.strict_fields).refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, client = self.state, None
        arrival_s, status = state.now(), 200
        try:
            if arrival_s < state.busy.until_s and self.is_refused_when_full:
                self._check_room(scope, arrival_s)
            most = state.settings.max_body_bytes
            for stage in self.stages:
                most += stage.form_bytes(scope)
            pieces = await read_pieces(scope, receive, most, "--max-body-mib")
            client = Client(receive)
            body = await decode_body(pieces, state.bodies.decode) if self.has_body else None
            if self.stages:
                client.pieces = pieces
            del pieces
            if (held := scope.get(HELD_BODY)) is not None:
                held.release()
            await self._run(body, arrival_s, scope, client, send)
        except Disconnected:
            status = 499  # nginx's number for a client that disconnected; it is only counted
        except asyncio.CancelledError:
            if client is None or not client.has_left:
                raise
            state.metrics.counters["quire:http_disconnects"] += 1
            status = 499
        except Exception as error:
            if client is not None:
                client.release()
            status = await self._refuse(error, scope, send)
        finally:
            if client is not None:
                client.release()
        state.metrics.response(self.path, status)

    async def _run(self, body: Any, arrival_s: float, scope: Scope, client: Client, send: Send) -> None:
        raise NotImplementedError

    def _check_room(self, scope: Scope, now_s: float) -> None:
        """Refuse a request while the engine does, unless it is of this process, or the rest of a stream.

        Raises:
            QuireError: as the engine.
        """
        if not call_of(scope).is_local and not self.has_its_place(scope):
            self.state.busy.check(now_s)

    def has_its_place(self, scope: Scope) -> bool:
        """Whether the request is the rest of a stream."""
        return any(stage.has_its_place(scope) for stage in self.stages)

    def _ignored_header(self, ignored: Ignored) -> list[tuple[bytes, bytes]]:
        self.state.metrics.counters["quire:ignored_fields"] += len(ignored)
        return ignored.header()

    async def _refuse(self, error: Exception, scope: Scope, send: Send) -> int:
        refusal = refusal_of(error, retry_after_s=self.state.settings.retry_after_s)
        request_id = call_of(scope).request_id
        if not isinstance(error, QuireError):
            log.exception("request_crashed", request_id=request_id, path=self.path)
        elif refusal.status >= 500 and refusal.code != "queue_full":  # which `Busy` logs once
            log.error("request_failed", request_id=request_id, status=refusal.status, error=refusal.message)
        elif log.debugging:
            log.debug("request_refused", request_id=request_id, status=refusal.status, error=refusal.message)
        await send_json(send, refusal.status, refusal.body(self.path), refusal.headers)
        return refusal.status


class JsonEndpoint(PostEndpoint):
    """An endpoint that computes one JSON value and runs nothing on the engine."""

    def __init__(self, state: ApiState, path: str, compute: Compute) -> None:
        super().__init__(state, path)
        self._compute = compute

    async def _run(self, body: Any, arrival_s: float, scope: Scope, client: Client, send: Send) -> None:
        ignored = Ignored(self._judged)
        answer = msgspec.json.encode(await self._compute(self.state, call_of(scope), body, ignored))
        client.release()
        await send_json(send, 200, answer, self._ignored_header(ignored))


class GenerateEndpoint(PostEndpoint):
    """An endpoint that runs a `Job`."""

    is_refused_when_full = True

    def __init__(
        self, state: ApiState, path: str, prepare: Prepare, stages: Sequence[CallStage] = ()
    ) -> None:
        super().__init__(state, path, stages)
        self._prepare = prepare

    async def _run(self, body: Any, arrival_s: float, scope: Scope, client: Client, send: Send) -> None:
        for stage in self.stages:
            if await stage.run(self, body, arrival_s, scope, client, send):
                return
        await self.generate(body, arrival_s, scope, client, send)

    async def generate(
        self,
        body: Any,
        arrival_s: float,
        scope: Scope,
        client: Client,
        send: Send,
        passage: Passage | None = None,
    ) -> None:
        """Answer a request. ``passage``: of an answer that can go on elsewhere, or has begun there."""
        state, ignored, call = self.state, Ignored(self._judged), call_of(scope)
        if passage is not None:
            call = replace(call, answer=passage.answer)
        job = await self._prepare(state, call, body, ignored)
        if isinstance(body, dict) and (body.get("priority") or body.get("user")):
            ignored += state.unread(body, call)
        if job.client_request_id is not None:
            call = replace(call, request_id=adopt_request_id(scope, job.client_request_id).request_id)
        if passage is not None:
            await passage.begin(state, job, call, client.pieces)
            client.pieces = []
        trace = trace_headers(scope["headers"]) if state.tracer is not None else {}
        generation = Generation(
            state, job, arrival_s, call, trace, *(() if passage is None else passage.parts)
        )
        if job.in_background and not call.runs_in_background:
            raise RequestError("background = true is not supported by this server.", param="background")
        for stage in self.stages:
            send = stage.telling(send, scope, body, generation)
        try:
            with state.running.entered(frozenset((job.answer.head.id, call.request_id)), generation):
                await self._answer(generation, ignored, client, send)
        finally:
            if passage is not None:
                await passage.end()
            for stage in self.stages:
                stage.ended(self.path, generation, state.now() - arrival_s)
        if log.debugging:
            generation.log_end(state.now() - arrival_s)

    async def _answer(self, generation: Generation, ignored: Ignored, client: Client, send: Send) -> None:
        try:
            if not generation.job.in_background:
                await generation.submit()
            leave = partial(generation.cancel, CANCELLED_BY_CLIENT)
            client.on_leave = leave if generation.job.in_background else generation.disconnect
            await generation.answer(send, self._ignored_header(ignored) if ignored else ())
        except QuireError:
            if not generation.disconnected:
                raise
        finally:
            client.release()
            await generation.streams.close()
        if generation.disconnected:
            raise Disconnected


class Client:
    """Watches for the client's disconnect: it cancels the task that serves the request, or calls ``on_leave``.

    It begins when the body is read.
    """

    def __init__(self, receive: Receive) -> None:
        self.has_left = False  # and the task is cancelled
        self.on_leave: Callable[[], Awaitable[None]] | None = None
        self.pieces: list[bytes] = []  # of the body, for the journal
        self._receive = receive
        self._serving = asyncio.current_task()
        self._watching = asyncio.create_task(self._watch())

    def release(self) -> None:
        """End: the answer is being sent, or was."""
        self._watching.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        if self.on_leave is not None:
            await self.on_leave()
            return
        assert self._serving is not None
        self.has_left = True
        self._serving.cancel()


def no_journal() -> NotFoundError:
    return NotFoundError("This server keeps no streams: start it with --journal DIR.", code="no_journal")
