"""`Proxy`: the walk of one request through the gateway.

    read → admit → place → attempt ─ first whole frame or whole answer → relay → end
                       ▲        │                                            │
                       ├─ retry ┘   while no byte went to the client         │
                       └─ migrate: another replica continues the stream ─────┘

A stream is relayed in whole frames. Each `send` waits until the client takes the bytes, and the backend's connection
is not read meanwhile, so the slowest side sets the pace. A client that leaves cancels the walk, which closes the
connection to the backend.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

from aiohttp import ClientResponse
from starlette.types import Receive, Scope, Send

from quire.errors import QuireError
from quire.http.account import COST_HEADER, cost_of
from quire.http.body import Disconnected
from quire.http.refusals import HttpError, Refusal, as_refusal, busy
from quire.metrics.log import Log
from quire_gateway.admission import Admission
from quire_gateway.answer import Answer
from quire_gateway.client_request import ClientRequest, read_request
from quire_gateway.exchange import Exchange
from quire_gateway.filter_config import FILTERED
from quire_gateway.frames import (
    LINES,
    Cutter,
    Frames,
    StreamMoves,
    error_frame,
    has_event,
    is_stream,
    without_usage,
)
from quire_gateway.headers import TAGGED, Pairs, to_backend, to_client
from quire_gateway.patience import Limit, lasting
from quire_gateway.placing import Placed
from quire_gateway.retrying import Retrying
from quire_gateway.sending import Opened, Outgoing
from quire_gateway.state import GatewayState
from quire_gateway.stream_errors import StreamError
from quire_gateway.upstream import RETRIED_STATUS, BackendFailed, Reply, closing, failures, read_reply
from quire_gateway.used import output_so_far

log = Log("gateway")
LEFT = 499  # nginx's number for a client that disconnected; it is only counted


class Proxy:
    """An ASGI application for one POST path."""

    def __init__(self, state: GatewayState, path: str) -> None:
        self._state = state
        self._path = path
        self._timeouts = state.config.timeouts_of(path)
        self._retrying = Retrying(state, self._timeouts)
        self._stages = state.stages.pipeline(path)
        self._admission = Admission(state.config, state.catalog, state.placing.num_tokens, self._stages)
        self._counts_tokens = state.config.counts_tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        exchange = Exchange(scope, Answer(send), state.new_id(), state.now())
        state.num_open += 1
        try:
            if state.is_draining:
                raise HttpError(
                    busy("The gateway is draining: send the request to another one.", "draining", 1)
                )
            most = state.config.server.max_body_mib << 20
            exchange.request = await read_request(scope, receive, most, state.bodies.decode)
            await self._stages.enter(exchange)
            await self._admission.admit(exchange)
            async with _cancelled_when_left(receive):
                await self._stages.serve(exchange, partial(self._serve, exchange))
        except Disconnected:
            exchange.outcome, exchange.answer.status = "left", LEFT
        except BackendFailed as error:
            await self._give_up(exchange, error)
        except Exception as error:
            if not isinstance(error, QuireError):
                log.exception("request_crashed", request_id=exchange.request_id, path=self._path)
            await self._refuse(exchange, as_refusal(error))
        finally:
            state.num_open -= 1
            await asyncio.shield(self._settle(exchange))

    async def _settle(self, exchange: Exchange) -> None:
        """A request has ended: count and book it, and learn from its usage."""
        await self._stages.after(exchange, self._state.now())
        num_tokens = exchange.usage.prompt_tokens
        if exchange.request is not None and exchange.target is not None and num_tokens is not None:
            self._state.placing.learn(exchange.request, exchange.target.model, num_tokens)

    async def _serve(self, exchange: Exchange) -> None:
        """Try backends until one has answered, or no more may be tried."""
        attempts = exchange.attempts
        self._state.budget.earn()
        while (placed := await self._retrying.place(exchange)) is not None:
            attempts.num += 1
            attempts.backend, attempts.target = placed.backend, placed.target
            try:
                await self._attempt(exchange, placed)
                return
            except BackendFailed as error:
                if not self._retrying.goes_on(exchange, error):
                    raise
        raise _why_none(exchange)

    async def _attempt(self, exchange: Exchange, placed: Placed) -> None:
        """Send the request to one backend and relay its answer.

        Raises:
            BackendFailed: before or after the first byte went to the client.
        """
        state, request, answer = self._state, exchange.request, exchange.answer
        assert request is not None
        timeouts = self._timeouts
        limit_s = timeouts.first_token_s if request.streams else timeouts.total_s
        is_good: bool | None = None
        try:
            self._stages.begun(exchange)
            with failures():
                async with lasting(limit_s) as limit:
                    with self._retrying.watching(exchange, placed):
                        opened = await self._open(exchange, placed)
                        placed = opened.placed
                        with closing(opened.response):
                            await self._relay(exchange, opened, limit)
            is_good = True
        except BackendFailed as error:
            if answer.is_writing:  # the time passed while the client took nothing
                raise Disconnected from error
            if exchange.usage.error is not None and answer.has_begun:  # the client has an error already
                await answer.end()
                return
            is_good = False if error.blames_backend else None
            raise
        finally:
            if exchange.usage.error is not None and answer.has_begun:
                is_good = self._broke(exchange, placed, exchange.usage.error)
            state.placing.ended(placed, is_good)

    async def _open(self, exchange: Exchange, placed: Placed) -> Opened:
        """Return the answer of a backend: of the one that was chosen, unless a stage asks another one too."""
        attempts = exchange.attempts

        async def send(to: Placed) -> Opened:
            return Opened(to, await self._send_to(exchange, to, is_second=to is not placed))

        opened = await self._stages.open(exchange, send, placed)
        if opened.placed is not placed:
            attempts.backend, attempts.target = opened.placed.backend, opened.placed.target
            self._stages.begun(exchange)
        return opened

    async def _send_to(self, exchange: Exchange, placed: Placed, *, is_second: bool) -> ClientResponse:
        """Send one attempt and return its answer once the head is there."""
        state, request, backend = self._state, exchange.request, placed.backend
        assert request is not None
        headers = to_backend(
            exchange.scope,
            exchange.request_id,
            backend.args.api_key,
            pass_keys=not state.config.server.checks_keys,
            trace_id=exchange.ledger_id,
        )
        model, adds_usage = placed.target.model, self._adds_usage(request)
        body = request.body_for(model, adds_usage=adds_usage, takes_salt=backend.takes_salt)
        outgoing = Outgoing(exchange, placed, headers, body, is_second)
        self._stages.prepare(outgoing)
        query = exchange.scope["query_string"].decode("latin-1")
        url = f"{backend.url}{exchange.path}{'?' + query if query else ''}"
        return await state.upstream.open("POST", url, outgoing.headers, outgoing.body)

    def _broke(self, exchange: Exchange, placed: Placed, error: StreamError) -> bool | None:
        """A stream ended with an error event, which its client has. Returns what it says of the backend's health."""
        exchange.outcome = "broken" if output_so_far(exchange) or not error.is_clients else "refused"
        if error.is_clients or error.tells_of_load:
            return None
        self._state.count_failure(placed.backend, BackendFailed("broken", error.message))
        return False

    async def _relay(self, exchange: Exchange, opened: Opened, limit: Limit) -> None:
        """Relay one answer: a stream as it comes, any other once it is whole."""
        response, answer = opened.response, exchange.answer
        kind = response.headers.get("content-type", "")
        if response.status == 200 and is_stream(kind):
            await self._relay_stream(exchange, opened, limit)
            return
        reply = await read_reply(response, self._state.config.server.max_answer_mib << 20)
        exchange.attempts.is_reading = False
        if reply.status in RETRIED_STATUS or answer.has_begun or self._retrying.falls_back(exchange, reply):
            raise BackendFailed("status", f"The backend answered {reply.status}.", reply)
        if reply.status == 200 and "json" in kind and not exchange.usage.read_whole(reply.body):
            raise BackendFailed("garbage", "The backend's answer says that it is JSON, and is not.")
        self._answered(exchange, opened)
        if reply.status >= 400:
            exchange.outcome = "refused" if reply.status < 500 else "failed"
        if (cost := response.headers.get(COST_HEADER)) is not None:
            exchange.usage.engine_s, exchange.usage.kv_block_s = cost_of(cost)
        await answer.send_whole(reply.status, reply.headers, reply.body)

    def _answered(self, exchange: Exchange, opened: Opened) -> None:
        self._stages.answered(exchange, opened)
        exchange.answer.answered_by(opened.placed.backend.name)

    async def _relay_stream(self, exchange: Exchange, opened: Opened, limit: Limit) -> None:
        """Relay server-sent events from the first whole frame on."""
        response, answer, stages = opened.response, exchange.answer, self._stages
        is_lines = response.headers["content-type"].startswith(LINES)
        read = exchange.usage.read_lines if is_lines else exchange.usage.read_frames
        now, timeouts, frames = self._state.now, self._timeouts, _make_cutter(exchange, response)
        total_s = timeouts.stream_total_s
        end_s = exchange.arrival_s + total_s if total_s is not None else float("inf")
        assert exchange.request is not None
        hides_usage, is_first = self._adds_usage(exchange.request), True
        # A timer per event would be a third of the relay's own work: a silent backend is noticed up to slack_s later.
        slack_s, renew_s = min(0.1 * timeouts.idle_s, 1.0), 0.0
        try:
            async for piece in _pieces(exchange, opened):
                events = frames.feed(piece)
                if not events or (is_first and not has_event(events)):
                    continue  # a comment is no answer: the time to the first token goes on
                read(events, self._path)
                if is_first:
                    self._begins(exchange, opened)
                    is_first = False
                if answer.first_s is None:
                    answer.first_s = now()
                for relayed in stages.relayed:
                    relayed(exchange)
                if hides_usage:
                    events = without_usage(events)
                await _send(answer, response, await answer.relay(events) if answer.steps else events)
                if now() >= renew_s:
                    renew_s = now() + slack_s
                    limit.renew(min(slack_s + timeouts.idle_s, end_s - now()))
            if is_first:
                raise BackendFailed("garbage", "The backend's stream ended without an event.")
            rest = frames.end()
            if exchange.continuation is not None:
                exchange.usage.engine_s, exchange.usage.kv_block_s = exchange.continuation.cost
            rest = await answer.finish(rest)
        except ValueError as error:
            raise BackendFailed("garbage", f"The backend's stream is not one of events: {error}.") from error
        except StreamMoves:
            raise BackendFailed("broken", "The backend gave the stream up.") from None
        await _send(answer, response, rest)
        if not answer.has_begun:  # the steps have left nothing
            await answer.begin(response.status, to_client(response.raw_headers))
        await answer.end()

    def _begins(self, exchange: Exchange, opened: Opened) -> None:
        """The first event of a stream has come. Raises `BackendFailed` if it is no answer."""
        _check_first(exchange)
        self._answered(exchange, opened)
        self._state.placing.started(opened.placed)
        if exchange.answer.has_begun:
            self._state.metrics.migrations[(opened.placed.backend.name,)] += 1

    def _adds_usage(self, request: ClientRequest) -> bool:
        """Whether the gateway asks for the usage of a stream, and the client did not."""
        return request.streams and not request.wants_usage and self._counts_tokens

    async def _give_up(self, exchange: Exchange, error: BackendFailed) -> None:
        """Every backend that may be tried has failed, or a stream broke."""
        if exchange.answer.has_begun or error.answer is None:
            await self._refuse(exchange, _refusal(error))
        else:
            exchange.outcome = "failed"
            refusal = error.answer
            await exchange.answer.send_whole(refusal.status, _with_time(refusal), refusal.body)

    async def _refuse(self, exchange: Exchange, refusal: Refusal) -> None:
        """Answer with an error; a stream that has begun ends with one."""
        is_filtered, answer = refusal.code == FILTERED, exchange.answer
        if answer.has_begun:
            exchange.outcome = "filtered" if is_filtered else "broken"
            await answer.end(error_frame(self._path, refusal))
            return
        exchange.outcome = "filtered" if is_filtered else "refused" if refusal.status < 500 else "failed"
        headers = [(b"content-type", b"application/json"), *refusal.headers]
        await answer.send_whole(refusal.status, headers, refusal.body(self._path))


def _with_time(answer: Reply) -> Pairs:
    """Return the headers of a backend's refusal; a 503 without `Retry-After` gets one."""
    has_time = any(name == b"retry-after" for name, _ in answer.headers)
    return answer.headers if has_time or answer.status != 503 else [*answer.headers, (b"retry-after", b"1")]


async def _pieces(exchange: Exchange, opened: Opened) -> AsyncGenerator[bytes, None]:
    attempts = exchange.attempts
    attempts.is_reading = False
    if opened.first:
        yield opened.first
    attempts.is_reading = True
    async for piece in opened.response.content.iter_any():
        attempts.is_reading = False
        yield piece
        attempts.is_reading = True
    attempts.is_reading = False


async def _send(answer: Answer, response: ClientResponse, frames: bytes) -> None:
    """Send whole frames to the client; raises `HttpError` if a step refused what follows them."""
    if not answer.has_begun and (frames or not answer.steps):
        await answer.begin(response.status, to_client(response.raw_headers))
    await answer.write(frames)


def _make_cutter(exchange: Exchange, response: ClientResponse) -> Cutter:
    """Return what cuts a stream into whole frames, by whether it is tagged."""
    fingerprint, continuation = response.headers.get(TAGGED.decode()), exchange.continuation
    if continuation is None or fingerprint is None:
        if exchange.answer.has_begun:
            raise BackendFailed("garbage", "The backend does not continue the stream.")
        return Frames(response.headers["content-type"])
    return continuation.groups(fingerprint)


@asynccontextmanager
async def _cancelled_when_left(receive: Receive) -> AsyncGenerator[None, None]:
    """Cancel the block when the client leaves; raises `Disconnected` then."""
    task, has_left = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            continue
        has_left = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not has_left:
            raise
        task.uncancel()
        raise Disconnected from None
    finally:
        watcher.cancel()


def _check_first(exchange: Exchange) -> None:
    """Raise `BackendFailed` if a stream begins with an error that another backend may not have."""
    error = exchange.usage.error
    if error is None or error.is_clients or exchange.answer.has_begun or output_so_far(exchange):
        return
    text = f"The backend's stream began with an error: {error.message}."
    refusal = busy(text, "backend_status", 1)
    headers = [(b"content-type", b"application/json"), *refusal.headers]
    reply = Reply(refusal.status, headers, refusal.body(exchange.path)) if error.tells_of_load else None
    exchange.usage.error = None
    raise BackendFailed("status", text, reply)


def _why_none(exchange: Exchange) -> QuireError:
    """Return what the client is told where no backend is left: how the last one failed, unless it is down."""
    failure, backend = exchange.attempts.failure, exchange.backend
    if failure is not None and not (failure.tells_of_death and backend is not None and not backend.is_ready):
        return failure
    text = f"No backend for the model {exchange.targets[0].model!r} can take the request now."
    if exchange.attempts.holder is not None:
        text = (
            "The backend that holds the response that the request goes on with cannot take it now. Send it again, or "
            "the whole conversation as input."
        )
    return HttpError(busy(text, "no_backend", 1))


def _refusal(error: BackendFailed) -> Refusal:
    """Return the answer for a failure that had no answer of its own."""
    if error.kind == "room":
        return busy(str(error), "gateway_full", 1)
    if error.kind == "timeout":
        return Refusal(504, str(error), code="backend_timeout")
    return Refusal(502, str(error), code=f"backend_{error.kind}")
