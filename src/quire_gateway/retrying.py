"""`Retrying`: whether and where a request is tried again after an attempt that failed.

    its backend died or hung     elsewhere at once, without charge: all requests there fare alike
    it answered badly            at another backend of the model, paid from the retry budget, `attempts` in all
    a cause of a fallback        at the fallback's model, without charge

A request that waits for the first byte, or whose stream another replica can continue, watches its backend: when polls
find that lost and another one is ready, the attempt is withdrawn. Closing its connection ends it at the backend, also
at a stopped one that wakes up later. The row in the ledger is of the attempt that answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from quire.clock import LOOK_S
from quire_gateway.causes import causes_of_failure, may_fall_back
from quire_gateway.config import TimeoutArgs
from quire_gateway.exchange import Exchange
from quire_gateway.placing import Placed
from quire_gateway.state import GatewayState
from quire_gateway.upstream import RETRIED_STATUS, BackendFailed, Reply

# Backends that may die or hang under one request that does not move on: it may be what they die of.
MAX_DEATHS = 10


class Retrying:
    """The retries of one path."""

    def __init__(self, state: GatewayState, timeouts: TimeoutArgs) -> None:
        self._state = state
        self._timeouts = timeouts

    async def place(self, exchange: Exchange) -> Placed | None:
        """Choose a backend. Where a replica has died and none is left, wait for one."""
        placing, now = self._state.placing, self._state.now
        placed, end_s = placing.place(exchange), now() + self._timeouts.ready_s
        while placed is None and now() < end_s and placing.may_come(exchange):
            await asyncio.sleep(LOOK_S)
            placed = placing.place(exchange)
        return placed

    def goes_on(self, exchange: Exchange, error: BackendFailed) -> bool:
        """Note that an attempt has failed; return whether the request may have another one."""
        attempts = exchange.attempts
        backend, target = attempts.backend, attempts.target
        assert backend is not None and target is not None  # noqa: PT018
        model = target.model
        attempts.failure = error
        attempts.tried.add((backend.life, model))
        attempts.causes |= causes_of_failure(error)
        self._state.count_failure(backend, error)
        if error.kind == "room":
            return False
        if exchange.answer.has_begun:
            return self._migrates(exchange, (backend.life, model), error)
        exchange.restart()
        if error.tells_of_death:
            attempts.num_deaths += 1
            return attempts.num_deaths < MAX_DEATHS
        if error.answer is not None and error.answer.status not in RETRIED_STATUS:
            attempts.closed.add(model)  # its other backends would say the same
        attempts.failures[model] += 1
        attempts.owed.add(model)
        return True

    def _migrates(self, exchange: Exchange, attempt: tuple[int, str], error: BackendFailed) -> bool:
        """Whether a stream that broke is continued elsewhere.

        The death of a replica is not charged to the retry budget, since all its streams break at once; what a live one
        answers is. The number of replicas that may die or fail in a row without the stream moving on is limited.
        """
        continuation, attempts = exchange.continuation, exchange.attempts
        total_s = self._timeouts.stream_total_s
        late = total_s is not None and self._state.now() - exchange.arrival_s >= total_s
        if continuation is None or late or not exchange.can_move:
            return False
        if continuation.has_moved():
            continuation.num_in_vain = attempts.num_deaths = 0
            attempts.tried = {attempt}
            return True
        if error.tells_of_death:
            attempts.num_deaths += 1
            return attempts.num_deaths < MAX_DEATHS
        continuation.num_in_vain += 1
        return continuation.num_in_vain < self._state.config.retries.attempts and self._state.budget.take()

    def falls_back(self, exchange: Exchange, answer: Reply) -> bool:
        """Whether a backend's answer that would go to the client sends the request to a fallback instead."""
        if exchange.answer.has_begun or answer.status < 400:
            return False
        return may_fall_back(causes_of_failure(BackendFailed("status", "", answer)), exchange.targets)

    @contextmanager
    def watching(self, exchange: Exchange, placed: Placed) -> Generator[None, None, None]:
        """Withdraw the attempt in the block when its backend is lost and another one can take the request.

        Raises:
            BackendFailed: of kind "unready".
        """
        attempts, task, is_withdrawn, why = exchange.attempts, asyncio.current_task(), False, ""
        assert task is not None
        num_before = task.cancelling()

        def look() -> None:
            nonlocal is_withdrawn, why
            free = (
                attempts.is_reading
                and (exchange.can_move or not exchange.answer.has_begun)
                and not is_withdrawn
            )
            lost = free and all(backend.is_lost for backend in attempts.running)
            if lost and self._state.placing.may_leave(exchange, placed):
                is_withdrawn, why = True, attempts.running[0].failure
                task.cancel()

        attempts.on_lost = look
        attempts.watch(placed.backend)
        attempts.is_reading = True
        try:
            yield
        except BaseException as error:
            is_alone = is_withdrawn and task.uncancel() <= num_before
            if is_alone and isinstance(error, asyncio.CancelledError):
                raise BackendFailed("unready", f"The backend is lost: {why}") from None
            raise
        finally:
            attempts.is_reading = False
            for backend in tuple(attempts.running):
                attempts.unwatch(backend)
            attempts.on_lost = None
