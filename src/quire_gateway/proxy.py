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
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from aiohttp import ClientResponse
from starlette.types import Receive, Scope, Send

from quire.errors import QuireError
from quire.http.account import COST_HEADER, cost_of
from quire.http.body import Disconnected
from quire.http.cache_messages import BLOCKS_HEADER
from quire.http.call import call_of
from quire.http.refusals import HttpError, Refusal, busy, refusal_of
from quire.metrics.log import Log
from quire_gateway.asked import Asked, read_asked
from quire_gateway.exchange import Exchange
from quire_gateway.filters import FILTERED
from quire_gateway.frames import LINES, Frames, error_frame, has_event, is_stream, without_usage
from quire_gateway.headers import Pairs, to_client
from quire_gateway.hedging import Opened
from quire_gateway.migrate import TAGGED, Groups, StreamMoves
from quire_gateway.patience import Limit, lasting
from quire_gateway.placing import Placed
from quire_gateway.retrying import Retrying
from quire_gateway.rows import output_so_far
from quire_gateway.sending import open_answer
from quire_gateway.state import GatewayState
from quire_gateway.stored import holder_of
from quire_gateway.stream_errors import StreamError
from quire_gateway.upstream import RETRIED_STATUS, BackendFailed, Whole, closing, failures, read_whole

log = Log("gateway")
RESPONSES = "/v1/responses"
LEFT = 499  # nginx's number for a client that disconnected; it is only counted


class Proxy:
    """An ASGI application for one POST path."""

    def __init__(self, state: GatewayState, path: str) -> None:
        self._state = state
        self._path = path
        self._timeouts = state.config.timeouts_of(path)
        self._retrying = Retrying(state, self._timeouts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        exchange = Exchange(scope, send, call_of(scope).request_id, self._path, state.now())
        exchange.ledger_id = state.new_id()
        state.num_open += 1
        try:
            if state.is_draining:
                raise HttpError(
                    busy("The gateway is draining: send the request to another one.", "draining", 1)
                )
            most = state.config.server.max_body_mib << 20
            exchange.asked = await read_asked(scope, receive, most, state.bodies.decode)
            state.enter_tenant(exchange)
            exchange.continuation = state.new_continuation()
            await state.admit(exchange)
            model = exchange.targets[0].model
            async with _cancelled_when_left(exchange, receive):
                if state.filters is not None:
                    await state.filter(exchange)
                async with self._loaded(exchange, model):
                    await self._serve(exchange)
        except Disconnected:
            exchange.outcome, exchange.status = "left", LEFT
        except BackendFailed as error:
            await self._give_up(exchange, error)
        except Exception as error:
            if not isinstance(error, QuireError):
                log.exception("request_crashed", request_id=exchange.request_id, path=self._path)
            await self._refuse(exchange, refusal_of(error))
        finally:
            state.num_open -= 1
            await asyncio.shield(state.settle(exchange))

    def _loaded(self, exchange: Exchange, model: str) -> AbstractAsyncContextManager[None]:
        """Keep a model that is loaded on demand in memory while its request runs."""
        if self._state.pool is None:
            return nullcontext()
        assert exchange.asked is not None
        return self._state.pool.use(model, exchange.asked.deadline_s)

    async def _serve(self, exchange: Exchange) -> None:
        """Try backends until one has answered, or no more may be tried."""
        state, asked = self._state, exchange.asked
        assert asked is not None
        state.budget.earn()
        exchange.promised_by = state.promises.backend_of(asked, exchange.tenant)
        exchange.holder = await holder_of(state, exchange)
        while (placed := await self._retrying.place(exchange)) is not None:
            exchange.num_attempts += 1
            exchange.backend, exchange.target = placed.backend, placed.target
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
        state, asked = self._state, exchange.asked
        assert asked is not None
        timeouts = self._timeouts
        limit_s = timeouts.first_token_s if asked.streams else timeouts.total_s
        is_good: bool | None = None
        try:
            state.books.begun(exchange, state.now())
            with failures():
                async with lasting(limit_s) as limit:
                    with self._retrying.watching(exchange, placed):
                        opened = await open_answer(
                            state, exchange, placed, adds_usage=self._adds_usage(asked)
                        )
                        placed = opened.placed
                        with closing(opened.response):
                            await self._relay(exchange, opened, limit)
            is_good = True
        except BackendFailed as error:
            if exchange.is_writing:  # the time passed while the client took nothing
                raise Disconnected from error
            if exchange.usage.error is not None and exchange.has_begun:  # the client has an error already
                await exchange.end()
                return
            is_good = False if error.blames_backend else None
            raise
        finally:
            if exchange.usage.error is not None and exchange.has_begun:
                is_good = self._broke(exchange, placed, exchange.usage.error)
            state.placing.over(placed, is_good)

    def _broke(self, exchange: Exchange, placed: Placed, error: StreamError) -> bool | None:
        """A stream ended with an error event, which its client has. Returns what it says of the backend's health."""
        exchange.outcome = "broken" if output_so_far(exchange) or not error.is_clients else "refused"
        if error.is_clients or error.tells_of_load:
            return None
        self._state.count_failure(placed.backend, BackendFailed("broken", error.message))
        return False

    async def _relay(self, exchange: Exchange, opened: Opened, limit: Limit) -> None:
        """Relay one answer: a stream as it comes, any other once it is whole."""
        placed, response = opened.placed, opened.response
        kind = response.headers.get("content-type", "")
        self._state.placing.learn_blocks(exchange, response.headers.get(BLOCKS_HEADER))
        if response.status == 200 and is_stream(kind):
            await self._relay_stream(exchange, opened, limit)
            return
        whole = await read_whole(response, self._state.config.server.max_answer_mib << 20)
        exchange.is_reading = False
        if whole.status in RETRIED_STATUS or exchange.has_begun or self._retrying.falls_back(exchange, whole):
            raise BackendFailed("status", f"The backend answered {whole.status}.", whole)
        if whole.status == 200 and "json" in kind and not exchange.usage.read_whole(whole.body):
            raise BackendFailed("garbage", "The backend's answer says that it is JSON, and is not.")
        self._own(exchange, placed)
        if whole.status >= 400:
            exchange.outcome = "refused" if whole.status < 500 else "failed"
        if (cost := response.headers.get(COST_HEADER)) is not None:
            exchange.usage.engine_s, exchange.usage.kv_block_s = cost_of(cost)
        body = whole.body
        if exchange.filtering is not None and whole.status == 200 and "json" in kind:
            body = await exchange.filtering.whole(body)
        await exchange.answer(whole.status, whole.headers, body)

    def _own(self, exchange: Exchange, placed: Placed) -> None:
        """Remember where a response is stored."""
        if self._path == RESPONSES and exchange.usage.answer_id is not None:
            self._state.holders.put(exchange.usage.answer_id, placed.backend.name)
        if exchange.sealing is not None and not exchange.has_begun:
            exchange.sealing.answered_by(placed.backend.name)

    async def _relay_stream(self, exchange: Exchange, opened: Opened, limit: Limit) -> None:
        """Relay server-sent events from the first whole frame on."""
        placed, response = opened.placed, opened.response
        is_lines = response.headers["content-type"].startswith(LINES)
        read = exchange.usage.read_lines if is_lines else exchange.usage.read_frames
        now, timeouts, frames = self._state.now, self._timeouts, _frames_of(exchange, response)
        total_s = timeouts.stream_total_s
        end_s = exchange.arrival_s + total_s if total_s is not None else float("inf")
        assert exchange.asked is not None
        hides_usage, is_first = self._adds_usage(exchange.asked), True
        # A timer per event would be a third of the relay's own work: a silent backend is noticed up to slack_s later.
        slack_s, renew_s = min(0.1 * timeouts.idle_s, 1.0), 0.0
        try:
            async for piece in _pieces(exchange, opened):
                whole = frames.feed(piece)
                if not whole or (is_first and not has_event(whole)):
                    continue  # a comment is no answer: the time to the first token goes on
                read(whole, self._path)
                if is_first:
                    _check_first(exchange)
                    is_first = False
                    self._own(exchange, placed)
                    self._state.placing.started(placed)
                    if exchange.has_begun:
                        self._state.metrics.migrations[(placed.backend.name,)] += 1
                if exchange.first_s is None:
                    exchange.first_s = now()
                self._state.books.relayed(exchange)
                if hides_usage:
                    whole = without_usage(whole)
                if exchange.filtering is not None:
                    whole = await exchange.filtering.feed(whole)
                await _send(exchange, response, whole)
                if now() >= renew_s:
                    renew_s = now() + slack_s
                    limit.renew(min(slack_s + timeouts.idle_s, end_s - now()))
            if is_first:
                raise BackendFailed("garbage", "The backend's stream ended without an event.")
            rest = frames.end()
            if exchange.continuation is not None:
                exchange.usage.engine_s, exchange.usage.kv_block_s = exchange.continuation.cost
            if exchange.filtering is not None:
                rest = await exchange.filtering.end(rest)
        except ValueError as error:
            raise BackendFailed("garbage", f"The backend's stream is not one of events: {error}.") from error
        except StreamMoves:
            raise BackendFailed("broken", "The backend gave the stream up.") from None
        await _send(exchange, response, rest)
        await exchange.end()

    def _adds_usage(self, asked: Asked) -> bool:
        """Whether the gateway asks for the usage of a stream, and the client did not."""
        return asked.streams and not asked.wants_usage and self._state.tenants.counts_tokens

    async def _give_up(self, exchange: Exchange, error: BackendFailed) -> None:
        """Every backend that may be tried has failed, or a stream broke."""
        if exchange.has_begun or error.answer is None:
            await self._refuse(exchange, _refusal(error))
        else:
            exchange.outcome = "failed"
            headers = self._with_time(exchange, error.answer)
            await exchange.answer(error.answer.status, headers, error.answer.body)

    def _with_time(self, exchange: Exchange, answer: Whole) -> Pairs:
        """Return the headers of a refusal with its `Retry-After`, and remember the backend that gave it."""
        after = dict(answer.headers).get(b"retry-after")
        if after is None:
            return [*answer.headers, *([(b"retry-after", b"1")] if answer.status == 503 else [])]
        if after.isdigit() and len(after) < 6 and exchange.asked is not None and exchange.backend is not None:
            self._state.promises.told(exchange.asked, exchange.tenant, exchange.backend.name, int(after))
        return answer.headers

    async def _refuse(self, exchange: Exchange, refusal: Refusal) -> None:
        """Answer with an error; a stream that has begun ends with one."""
        is_filtered = refusal.code == FILTERED
        if exchange.has_begun:
            exchange.outcome = "filtered" if is_filtered else "broken"
            await exchange.end(error_frame(self._path, refusal))
            return
        exchange.outcome = "filtered" if is_filtered else "refused" if refusal.status < 500 else "failed"
        headers = [(b"content-type", b"application/json"), *refusal.headers]
        await exchange.answer(refusal.status, headers, refusal.body(self._path))


async def _pieces(exchange: Exchange, opened: Opened) -> AsyncGenerator[bytes, None]:
    exchange.is_reading = False
    if opened.first:
        yield opened.first
    exchange.is_reading = True
    async for piece in opened.response.content.iter_any():
        exchange.is_reading = False
        yield piece
        exchange.is_reading = True
    exchange.is_reading = False


async def _send(exchange: Exchange, response: ClientResponse, frames: bytes) -> None:
    """Send whole frames to the client; raises `HttpError` if a filter refused what follows them."""
    filtering = exchange.filtering
    if not exchange.has_begun and (frames or filtering is None):
        await exchange.begin(response.status, to_client(response.raw_headers))
    if frames:
        await exchange.write(frames)
    if filtering is not None:
        filtering.check()


def _frames_of(exchange: Exchange, response: ClientResponse) -> Frames | Groups:
    """Return what cuts a stream into whole frames, by whether it is tagged."""
    fingerprint, continuation = response.headers.get(TAGGED.decode()), exchange.continuation
    if continuation is None or fingerprint is None:
        if exchange.has_begun:
            raise BackendFailed("garbage", "The backend does not continue the stream.")
        return Frames(response.headers["content-type"])
    continuation.fingerprint = fingerprint
    return Groups(continuation)


@asynccontextmanager
async def _cancelled_when_left(exchange: Exchange, receive: Receive) -> AsyncGenerator[None, None]:
    """Cancel the block when the client leaves; raises `Disconnected` then."""
    task = asyncio.current_task()
    assert task is not None

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            continue
        exchange.client_left = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not exchange.client_left:
            raise
        task.uncancel()
        raise Disconnected from None
    finally:
        watcher.cancel()


def _check_first(exchange: Exchange) -> None:
    """Raise `BackendFailed` if a stream begins with an error that another backend may not have."""
    error = exchange.usage.error
    if error is None or error.is_clients or exchange.has_begun or output_so_far(exchange):
        return
    text = f"The backend's stream began with an error: {error.message}."
    refusal = busy(text, "backend_status", 1)
    headers = [(b"content-type", b"application/json"), *refusal.headers]
    whole = Whole(refusal.status, headers, refusal.body(exchange.path)) if error.tells_of_load else None
    exchange.usage.error = None
    raise BackendFailed("status", text, whole)


def _why_none(exchange: Exchange) -> QuireError:
    """Return what the client is told where no backend is left: how the last one failed, unless it is down."""
    failure, backend = exchange.failure, exchange.backend
    if failure is not None and not (failure.tells_of_death and backend is not None and not backend.is_ready):
        return failure
    text = f"No backend for the model {exchange.targets[0].model!r} can take the request now."
    if exchange.holder is not None:
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
