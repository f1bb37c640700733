"""The POST endpoints: read, check, run, answer. One ASGI application per kind of endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.types import Receive, Scope, Send

from quire.api.dialect import Compute, Read
from quire.api.generation import CANCELLED_BY_CLIENT, Generation
from quire.api.state import ApiState
from quire.errors import NotFoundError, QuireError, RequestError
from quire.http.body import HELD_BODY, Disconnected, decode_body, read_pieces, send_json
from quire.http.call import adopt_request_id, call_of
from quire.http.refusals import as_refusal
from quire.http.wire import Ignored
from quire.metrics.log import Log
from quire.metrics.trace import trace_headers

if TYPE_CHECKING:
    from quire.api.passage import Passage

log = Log("api")


class CallStage:
    """Base of the stages of a call: what each may do."""

    # Whether it reads the bytes of the body (`Client.pieces`).
    keeps_body = False

    def has_its_place(self, scope: Scope) -> bool:
        """Whether a full queue does not refuse the request."""
        return False

    def form_bytes(self, scope: Scope) -> int:
        """Return by how much the request's body may be longer."""
        return 0

    async def run(self, endpoint: GenerateEndpoint, body: Any, client: Client) -> bool:
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
        self._keeps_body = any(stage.keeps_body for stage in stages)
        self.path = path
        self.judged = Ignored.of(lenient=state.settings.lenient, strict=state.settings.strict_fields).refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, status = self.state, 200
        client = Client(scope, receive, send, state.now())
        try:
            if client.arrival_s < state.busy.until_s and self.is_refused_when_full:
                self._check_room(scope, client.arrival_s)
            most = state.settings.max_body_bytes
            for stage in self.stages:
                most += stage.form_bytes(scope)
            pieces = await read_pieces(scope, receive, most, "--max-body-mib")
            client.watch()
            body = await decode_body(pieces, state.bodies.decode) if self.has_body else None
            if self._keeps_body:
                client.pieces = pieces
            del pieces
            if (held_body := scope.get(HELD_BODY)) is not None:
                held_body.release()
            await self._run(body, client)
        except Disconnected:
            # nginx's number for a client that disconnected. It is only counted.
            status = 499
        except asyncio.CancelledError:
            if not client.has_left:
                raise
            state.metrics.counters["quire:http_disconnects"] += 1
            status = 499
        except Exception as error:
            client.release()
            status = await self._refuse(error, scope, send)
        finally:
            client.release()
        state.metrics.response(self.path, status)

    async def _run(self, body: Any, client: Client) -> None:
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

    def header_of_ignored(self, ignored: Ignored) -> list[tuple[bytes, bytes]]:
        self.state.metrics.counters["quire:ignored_fields"] += len(ignored)
        return ignored.header()

    async def _refuse(self, error: Exception, scope: Scope, send: Send) -> int:
        refusal = as_refusal(error, retry_after_s=self.state.settings.retry_after_s)
        request_id = call_of(scope).request_id
        if not isinstance(error, QuireError):
            log.exception("request_crashed", request_id=request_id, path=self.path)
        elif refusal.status >= 500 and refusal.code != "queue_full":  # `Busy` logs a full queue once
            log.error("request_failed", request_id=request_id, status=refusal.status, error=refusal.message)
        elif log.is_debugging():
            log.debug("request_refused", request_id=request_id, status=refusal.status, error=refusal.message)
        await send_json(send, refusal.status, refusal.body(self.path), refusal.headers)
        return refusal.status


class JsonEndpoint(PostEndpoint):
    """An endpoint that computes one JSON value and runs nothing on the engine."""

    def __init__(self, state: ApiState, path: str, compute: Compute) -> None:
        super().__init__(state, path)
        self._compute = compute

    async def _run(self, body: Any, client: Client) -> None:
        ignored = Ignored(self.judged)
        answer = msgspec.json.encode(await self._compute(self.state, call_of(client.scope), body, ignored))
        client.release()
        await send_json(client.send, 200, answer, self.header_of_ignored(ignored))


class GenerateEndpoint(PostEndpoint):
    """An endpoint that runs a `Job`."""

    is_refused_when_full = True

    def __init__(self, state: ApiState, path: str, read: Read, stages: Sequence[CallStage] = ()) -> None:
        super().__init__(state, path, stages)
        self._read = read

    async def _run(self, body: Any, client: Client) -> None:
        for stage in self.stages:
            if await stage.run(self, body, client):
                return
        await self.generate(body, client)

    async def generate(self, body: Any, client: Client, passage: Passage | None = None) -> None:
        """Answer a request. ``passage``: of an answer that can go on elsewhere, or has begun there."""
        state, ignored, scope, send = self.state, Ignored(self.judged), client.scope, client.send
        call = call_of(scope)
        if passage is not None:
            call = replace(call, answer=passage.answer)
        job = await self._read(state, call, body, ignored)
        if isinstance(body, dict) and (body.get("priority") or body.get("user")):
            ignored += state.unread(body, call)
        if job.client_request_id is not None:
            call = replace(call, request_id=adopt_request_id(scope, job.client_request_id).request_id)
        if passage is not None:
            await passage.begin(state, job, call, client.pieces)
            client.pieces = []
        trace = trace_headers(scope["headers"]) if state.tracer is not None else {}
        generation = Generation(
            state, job, client.arrival_s, call, trace, *(() if passage is None else passage.parts)
        )
        if job.in_background and not call.runs_in_background:
            raise RequestError("background = true is not supported by this server.", param="background")
        for stage in self.stages:
            send = stage.telling(send, scope, body, generation)
        place = object()
        state.running[place] = frozenset((job.answer.head.id, call.request_id)), generation
        try:
            await self._answer(generation, ignored, client, send)
        finally:
            del state.running[place]
            if passage is not None:
                await passage.end()
            for stage in self.stages:
                stage.ended(self.path, generation, state.now() - client.arrival_s)
        if log.is_debugging():
            _log_end(generation, state.now() - client.arrival_s)

    async def _answer(self, generation: Generation, ignored: Ignored, client: Client, send: Send) -> None:
        try:
            if not generation.job.in_background:
                await generation.submit()
            leave = partial(generation.cancel, CANCELLED_BY_CLIENT)
            client.on_leave = leave if generation.job.in_background else generation.disconnect
            await generation.answer(send, self.header_of_ignored(ignored) if ignored else ())
        except QuireError:
            if not generation.disconnected:
                raise
        finally:
            client.release()
            await generation.streams.close()
        if generation.disconnected:
            raise Disconnected


def _log_end(generation: Generation, seconds: float) -> None:
    """Log at the level debug what the request has used."""
    prompt_tokens, cached_tokens, output_tokens = generation.usage.counts
    log.debug(
        "request_done",
        request_id=generation.call.request_id,
        id=generation.job.answer.head.id,
        seconds=seconds,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        output_tokens=output_tokens,
    )


class Client:
    """The client of one request, and where its answer goes.

    From `watch` on, its disconnect cancels the task that serves the request, or calls ``on_leave``.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, arrival_s: float) -> None:
        self.scope = scope
        self.send = send
        self.arrival_s = arrival_s
        # It has disconnected, and the task is cancelled.
        self.has_left = False
        self.on_leave: Callable[[], Awaitable[None]] | None = None
        # The body, for the journal.
        self.pieces: list[bytes] = []
        self._receive = receive
        self._serving = asyncio.current_task()
        self._watching: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """The body is read: what the client sends next is its disconnect."""
        self._watching = asyncio.create_task(self._wait())

    def release(self) -> None:
        """Watch no more: the answer is being sent, or was."""
        if self._watching is not None:
            self._watching.cancel()

    async def _wait(self) -> None:
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
