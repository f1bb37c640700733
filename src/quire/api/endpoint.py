"""The POST endpoints: read, check, run, answer. One ASGI application per kind of endpoint."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from quire.api.finished import telling_cost
from quire.api.generation import CANCELLED_BY_CLIENT, Generation
from quire.api.job import Job
from quire.api.journal import Entry, event_of
from quire.api.journal_file import Head
from quire.api.piece_blocks import telling_blocks
from quire.api.relayed import MAX_DELIVERED_BYTES, Relayed, read_relayed, resumes
from quire.api.state import ApiState
from quire.errors import NotFoundError, QuireError, RequestError
from quire.http.body import HELD_BODY, Disconnected, decode_body, header, read_pieces, send_json
from quire.http.call import AnswerName, Call, adopt_request_id, call_of
from quire.http.refusals import Refusal, refusal_of
from quire.http.wire import Ignored
from quire.metrics.log import Log
from quire.metrics.trace import trace_headers

# Whose streams the journal has: server-sent events.
JOURNALED = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
SEED_BITS = 53
log = Log("api")

# (state, call, body, what collects ignored fields and judges unknown names) → job
Prepare = Callable[[ApiState, Call, Any, list[str] | None], Awaitable[Job]]
# The same → the JSON value of the answer.
Compute = Callable[[ApiState, Call, Any, list[str] | None], Awaitable[Any]]


class PostEndpoint:
    """An ASGI application for one path: it reads the body under limits, and answers errors in the form of the path."""

    def __init__(self, state: ApiState, path: str) -> None:
        self._state = state
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival_s = self._state.now()
        refusal = self._early_refusal(scope, arrival_s)
        if refusal is not None:
            await send_json(send, refusal.status, refusal.body(self._path), refusal.headers)
            self._state.metrics.response(self._path, refusal.status)
            return
        status, client = 200, Client(receive)
        try:
            pieces = await read_pieces(scope, receive, self._max_body_bytes(scope), "--max-body-mib")
            client.watch()
            body = await self._decode(pieces)
            if self._state.journal is not None:
                client.pieces = pieces
            del pieces
            if (held := scope.get(HELD_BODY)) is not None:
                held.release()
            await self._run(body, arrival_s, scope, client, send)
        except Disconnected:
            status = 499  # nginx's number for a client that disconnected; it is only counted
        except asyncio.CancelledError:
            if not client.has_left:
                raise
            self._state.metrics.counters["quire:http_disconnects"] += 1
            status = 499
        except Exception as error:
            client.release()
            status = await self._refuse(error, scope, send)
        finally:
            client.release()
        self._state.metrics.response(self._path, status)

    async def _run(self, body: Any, arrival_s: float, scope: Scope, client: Client, send: Send) -> None:
        raise NotImplementedError

    def _max_body_bytes(self, scope: Scope) -> int:
        return self._state.settings.max_body_bytes

    async def _decode(self, pieces: list[bytes]) -> Any:
        return await decode_body(pieces, self._state.bodies.decode)

    def _early_refusal(self, scope: Scope, now_s: float) -> Refusal | None:
        """Return the answer to a request that is refused before its body is read."""
        return None

    def _ignored(self) -> Ignored:
        """Return the list that collects the fields which the request's answer does not depend on."""
        return Ignored.of(lenient=self._state.settings.lenient, strict=self._state.settings.strict_fields)

    def _ignored_header(self, ignored: Ignored) -> list[tuple[bytes, bytes]]:
        self._state.metrics.counters["quire:ignored_fields"] += len(ignored)
        return ignored.header()

    async def _refuse(self, error: Exception, scope: Scope, send: Send) -> int:
        refusal = refusal_of(error, retry_after_s=self._state.settings.retry_after_s)
        request_id = call_of(scope).request_id
        if not isinstance(error, QuireError):
            log.exception("request_crashed", request_id=request_id, path=self._path)
        elif refusal.status >= 500 and refusal.code != "queue_full":  # which `Busy` logs once
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

    async def _run(self, body: Any, arrival_s: float, scope: Scope, client: Client, send: Send) -> None:
        ignored = self._ignored()
        answer = msgspec.json.encode(await self._compute(self._state, call_of(scope), body, ignored))
        client.release()
        await send_json(send, 200, answer, self._ignored_header(ignored))


class GenerateEndpoint(PostEndpoint):
    """An endpoint that runs a `Job`."""

    def __init__(self, state: ApiState, path: str, prepare: Prepare) -> None:
        super().__init__(state, path)
        self._prepare = prepare

    def _early_refusal(self, scope: Scope, now_s: float) -> Refusal | None:
        busy = self._state.busy
        return busy.refusal(now_s) if now_s < busy.until_s and self._may_be_refused(scope) else None

    def _may_be_refused(self, scope: Scope) -> bool:
        """Whether the request is neither of this process nor the rest of a stream that had its place."""
        resumed = self._state.journal is not None and header(scope, b"last-event-id") is not None
        is_own = call_of(scope).is_local
        return not (is_own or resumed or resumes(scope, self._state.settings.gateway_key))

    async def _run(self, body: Any, arrival_s: float, scope: Scope, client: Client, send: Send) -> None:
        journal, given = self._state.journal, header(scope, b"last-event-id")
        if journal is not None and given is not None:
            entry = await journal.resume(call_of(scope).tenant, *event_of(given))
            try:
                if (
                    entry.head is None
                    or entry.head.path != self._path
                    or not await self._is_body(entry, body)
                ):
                    raise RequestError(
                        "With Last-Event-ID the request must be the one whose stream it resumes. GET "
                        f"/v1/streams/{entry.stream_id} resumes it without a body.",
                        code="another_request",
                    )
                await self.resume(entry, body, arrival_s, scope, client, send)
            finally:
                await journal.release(entry)
            return
        relayed, body = read_relayed(call_of(scope), scope, body, self._state.settings.gateway_key)
        if journal is not None and relayed is None and self._path in JOURNALED and _is_streamed(body):
            state = self._state
            answer = AnswerName(state.new_id(), int(state.unix_time()), secrets.randbits(SEED_BITS))
            relayed = Relayed(answer, by_gateway=False)
        await self._generate(body, relayed, arrival_s, scope, client, send)

    async def resume(
        self, entry: Entry, body: Any, arrival_s: float, scope: Scope, client: Client, send: Send
    ) -> None:
        """Answer with the rest of a stream of the journal. ``body``: of the request that began it."""
        relayed = entry.relayed(self._state.unix_time())
        await self._generate(body, relayed, arrival_s, scope, client, send, entry)

    async def _generate(
        self,
        body: Any,
        relayed: Relayed | None,
        arrival_s: float,
        scope: Scope,
        client: Client,
        send: Send,
        entry: Entry | None = None,
    ) -> None:
        """Answer a request. ``entry``: the stream that it resumes."""
        state, ignored, call = self._state, self._ignored(), call_of(scope)
        if relayed is not None:
            call = replace(call, answer=relayed.answer)
        job = replace(await self._prepare(state, call, body, ignored), relayed=relayed)
        ignored += state.unread(body, call)
        model = job.answer.head.model
        if relayed is not None:
            relayed.check(self._state.continuable_with(model), len(job.prompts) * job.sampling.n)
        call = adopt_request_id(scope, job.client_request_id)
        trace = trace_headers(scope["headers"]) if self._state.tracer is not None else {}
        begun = await self._begun(job, call, client) if entry is None else None
        generation = Generation(state, job, arrival_s, call, trace, entry or begun)
        if job.in_background and not call.runs_in_background:
            raise RequestError("background = true is not supported by this server.", param="background")
        ids = frozenset((job.answer.head.id, call.request_id))
        send = telling_blocks(send, scope, self._state, body, job, generation.streams)
        send = telling_cost(send, call.account, generation.streams.cost)
        try:
            with self._state.running.entered(ids, generation):
                await self._answer(generation, ignored, client, send)
        finally:
            if begun is not None and state.journal is not None:
                await state.journal.release(begun)
            seconds, tokens = self._state.now() - arrival_s, generation.usage.counts
            cost = generation.streams.cost()
            self._state.finished.put(call.account, model, self._path, tokens, seconds, cost)
        if log.debugging:
            names = dict(zip(("prompt_tokens", "cached_tokens", "output_tokens"), tokens, strict=True))
            log.debug(
                "request_done", request_id=call.request_id, id=job.answer.head.id, seconds=seconds, **names
            )

    async def _begun(self, job: Job, call: Call, client: Client) -> Entry | None:
        """Return the new entry of the journal for a stream; None if it is not written there."""
        state, relayed, pieces = self._state, job.relayed, client.pieces
        client.pieces = []
        if state.journal is None or relayed is None or relayed.by_gateway or not job.is_continuable:
            return None
        fingerprint = state.continuable_with(job.answer.head.model)
        num_bytes = sum(map(len, pieces))
        head = Head(self._path, call.tenant, str(relayed.answer), fingerprint, state.unix_time(), num_bytes)
        return await state.journal.begin(job.answer.head.id, head, pieces)

    async def _is_body(self, entry: Entry, body: Any) -> bool:
        return bool(body == await self._decode([entry.body]))

    def _max_body_bytes(self, scope: Scope) -> int:
        is_form = resumes(scope, self._state.settings.gateway_key)
        return super()._max_body_bytes(scope) + (MAX_DELIVERED_BYTES if is_form else 0)

    async def _answer(self, generation: Generation, ignored: Ignored, client: Client, send: Send) -> None:
        try:
            if not generation.job.in_background:
                await generation.submit()
            leave = partial(generation.cancel, CANCELLED_BY_CLIENT)
            client.on_leave = leave if generation.job.in_background else generation.disconnect
            await generation.answer(send, self._ignored_header(ignored))
        except QuireError:
            if not generation.disconnected:
                raise
        finally:
            client.release()
            await generation.close()
        if generation.disconnected:
            raise Disconnected


class Client:
    """Watches for the client's disconnect: it cancels the task that serves the request, or calls ``on_leave``."""

    def __init__(self, receive: Receive) -> None:
        self.has_left = False  # and the task is cancelled
        self.on_leave: Callable[[], Awaitable[None]] | None = None
        self.pieces: list[bytes] = []  # of the body, for the journal
        self._receive = receive
        self._serving = asyncio.current_task()
        self._watching: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Begin; the body is read by now."""
        self._watching = asyncio.create_task(self._watch())

    def release(self) -> None:
        """End: the answer is being sent, or was."""
        if self._watching is not None:
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


def _is_streamed(body: Any) -> bool:
    return isinstance(body, dict) and body.get("stream") is True


class StreamEndpoint(PostEndpoint):
    """The rest of a stream of the journal, from behind ``Last-Event-ID``; without that header, the whole of it."""

    def __init__(self, state: ApiState, endpoints: Mapping[str, GenerateEndpoint]) -> None:
        """``endpoints``: by path, those whose streams are in the journal."""
        super().__init__(state, "/v1/streams")
        self._endpoints = endpoints

    async def _decode(self, pieces: list[bytes]) -> Any:
        return None  # a GET has no body

    async def _run(self, body: Any, arrival_s: float, scope: Scope, client: Client, send: Send) -> None:
        journal, stream_id = self._state.journal, scope["path_params"]["stream_id"]
        if journal is None:
            raise NotFoundError(
                "This server keeps no streams: start it with --journal DIR.", code="no_journal"
            )
        event = event_of(header(scope, b"last-event-id") or b"0", stream_id)
        entry = await journal.resume(call_of(scope).tenant, *event)
        try:
            assert entry.head is not None
            endpoint = self._endpoints[entry.head.path]
            body = await endpoint._decode([entry.body])
            await endpoint.resume(entry, body, arrival_s, scope, client, send)
        finally:
            await journal.release(entry)
