"""`Continuing`: what replicas of Quire are told of a request, so that another one can go on with its stream."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from quire.http.account import ledger_header
from quire.request import SEED_BITS
from quire_gateway.exchange import Exchange
from quire_gateway.fleet import Backend
from quire_gateway.migrate import Continuation
from quire_gateway.sending import Outgoing
from quire_gateway.stage import Stage


class Continuing(Stage):
    """Tells replicas of Quire for whom a request runs, and lets its stream go on at another one.

    ``key_of``: the key by which a replica knows this gateway; ``ledger_id``: of the ledger that books the request;
    ``new_id``: draws an id; ``now``: monotonic seconds; ``unix_time``: seconds since 1970.
    """

    def __init__(
        self,
        key_of: Callable[[Backend], str | None],
        ledger_id: Callable[[], str],
        new_id: Callable[[], str],
        now: Callable[[], float],
        unix_time: Callable[[], float],
    ) -> None:
        self._key_of = key_of
        self._ledger_id = ledger_id
        self._new_id = new_id
        self._now = now
        self._unix_time = unix_time

    async def enter(self, exchange: Exchange) -> None:
        exchange.continuation = Continuation(
            self._new_id(), int(self._unix_time()), secrets.randbits(SEED_BITS)
        )

    def prepare(self, outgoing: Outgoing) -> None:
        """Name the answer, the account and the ledger; a stream that goes on is sent with what the client has."""
        exchange, backend = outgoing.exchange, outgoing.placed.backend
        continuation, key = exchange.continuation, self._key_of(backend)
        assert continuation is not None
        has_begun = exchange.answer.has_begun
        if key is not None and outgoing.placed.target.model in backend.fingerprints:
            outgoing.headers += continuation.headers(key, resumes=has_begun)
            outgoing.headers += exchange.account.headers(is_second=outgoing.is_second)
            outgoing.headers += ledger_header(self._ledger_id())
        if has_begun:
            outgoing.body = continuation.body(outgoing.body, self._now() - exchange.arrival_s)
