"""`open_answer`: what is sent to a backend, or to two, for an answer."""

from __future__ import annotations

from aiohttp import ClientResponse

from quire.http.account import ledger_header
from quire_gateway.exchange import Exchange
from quire_gateway.headers import to_backend
from quire_gateway.hedging import Opened
from quire_gateway.placing import Placed
from quire_gateway.state import GatewayState
from quire_gateway.upstream import BackendFailed


async def open_answer(state: GatewayState, exchange: Exchange, placed: Placed, *, adds_usage: bool) -> Opened:
    """Send the request of an exchange; a hedged one to a second backend, too, where the first is slow.

    ``adds_usage``: ask for the usage of a stream. The caller closes the answer.

    Raises:
        BackendFailed: there is none.
    """
    asked = exchange.asked
    assert asked is not None

    async def send(to: Placed) -> ClientResponse:
        is_second = to is not placed
        return await _send_to(state, exchange, to, adds_usage=adds_usage, is_second=is_second)

    num_tokens = state.placing.num_tokens(asked, placed.target.model)
    hedging = state.hedging
    after_s = None
    if hedging is not None and not exchange.has_begun:
        after_s = hedging.after_s(asked.streams, num_tokens)
    if hedging is None or after_s is None:
        return Opened(placed, await send(placed))

    headers, targets = exchange.route_headers, exchange.targets

    def another() -> Placed | None:
        exchange.tried.add((placed.backend.life, placed.target.model))
        exchange.num_attempts += 1
        exchange.targets = [placed.target]  # the same model
        found = state.placing.place(exchange)
        exchange.targets = targets
        if found is not None:
            exchange.watch(found.backend)
        return found

    def over(attempt: Placed, error: BackendFailed | None) -> None:
        exchange.unwatch(attempt.backend)
        state.placing.over(attempt, False if error is not None and error.blames_backend else None)
        if error is not None:
            exchange.tried.add((attempt.backend.life, attempt.target.model))
            state.count_failure(attempt.backend, error)

    opened = await hedging.open(placed, send, another, over, num_tokens, after_s)
    if opened.placed is placed:
        exchange.route_headers = headers
    else:
        exchange.backend, exchange.target = opened.placed.backend, opened.placed.target
        state.books.begun(exchange, state.now())
    return opened


async def _send_to(
    state: GatewayState, exchange: Exchange, placed: Placed, *, adds_usage: bool, is_second: bool
) -> ClientResponse:
    """Send one attempt and return its answer once the head is there.

    ``is_second``: beside another attempt that is still running. The replica then keeps no record of its usage, since a
    request has one.
    """
    asked, backend = exchange.asked, placed.backend
    assert asked is not None
    headers = to_backend(
        exchange.scope,
        exchange.request_id,
        backend.args.api_key,
        pass_keys=not state.config.server.checks_keys,
        trace_id=exchange.ledger_id,
    )
    salt = exchange.salt if backend.takes_salt else None
    body = asked.body_for(placed.target.model, adds_usage=adds_usage, salt=salt)
    continuation, key = exchange.continuation, state.key_of(backend)
    if continuation is not None and key is not None and placed.target.model in backend.fingerprints:
        headers += continuation.headers(key, resumes=exchange.has_begun)
        headers += state.placing.asks_for_blocks()
        headers += exchange.account.headers(is_second=is_second)
        headers += ledger_header(state.books.ledger_id)
    if continuation is not None and exchange.has_begun:
        body = continuation.body(body, state.now() - exchange.arrival_s)
    query = exchange.scope["query_string"].decode("latin-1")
    return await state.upstream.open(
        "POST", f"{backend.url}{exchange.path}{'?' + query if query else ''}", headers, body
    )
