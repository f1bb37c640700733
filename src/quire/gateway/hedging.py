"""`Hedging`: a stream whose first token is late is asked of a second backend too; the first token wins.

The other attempt is cancelled, which ends its work. Both have the same id and seed, so that replicas of Quire answer
alike. The ledger has one row, of the attempt that won; what the other one used is counted as waste.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import ClientResponse

from quire.gateway.config import HedgeArgs
from quire.gateway.placing import Placed
from quire.gateway.retries import RetryBudget
from quire.gateway.upstream import BackendFailed, failures

_RESERVE = 10  # hedges that may be made in a burst


@dataclass(frozen=True, slots=True)
class Opened:
    """An answer that has begun. ``first``: the first bytes of its stream."""

    placed: Placed
    response: ClientResponse
    first: bytes = b""


Send = Callable[[Placed], Awaitable[ClientResponse]]
Over = Callable[
    [Placed, BackendFailed | None], None
]  # an attempt has ended without a winner: failed, or cancelled


class Hedging:
    """Which requests are hedged, and what came of them."""

    def __init__(self, args: HedgeArgs) -> None:
        self._args = args
        self._budget = RetryBudget(args.budget, _RESERVE)
        self.counts: Counter[tuple[str, str]] = (
            Counter()
        )  # (backend, won | lost), of requests with two attempts
        self.waste: Counter[tuple[str]] = (
            Counter()
        )  # (backend,): prompt tokens of attempts that lost, as estimated

    def wants(self, streams: bool, num_prompt_tokens: int) -> bool:
        """Whether a request may have a second attempt."""
        self._budget.earn()
        return (
            streams and self._args.after_s is not None and num_prompt_tokens <= self._args.max_prompt_tokens
        )

    async def open(
        self,
        first: Placed,
        send: Send,
        another: Callable[[], Placed | None],
        over: Over,
        num_prompt_tokens: int,
    ) -> Opened:
        """Send a request, and send it again to ``another`` backend if no token comes within ``after_s``.

        Raises:
            BackendFailed: no attempt succeeded; the error is that of the first one, for which ``over`` is not called.
        """
        tasks = {asyncio.create_task(_open(send, first)): first}
        num_sent, errors = 1, dict[Placed, BackendFailed]()
        won: Opened | None = None
        try:
            await asyncio.wait(tasks, timeout=self._args.after_s)
            if not next(iter(tasks)).done() and self._budget.take() and (second := another()) is not None:
                tasks[asyncio.create_task(_open(send, second))] = second
                num_sent = 2
            while tasks and won is None:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done if won is None else ():
                    placed = tasks.pop(task)
                    try:
                        won = task.result()
                        break
                    except BackendFailed as error:
                        errors[placed] = error
        finally:
            await _cancelled(tasks)
            for placed in tasks.values():
                self.waste[(placed.backend.name,)] += num_prompt_tokens if won is not None else 0
                if placed is not first or won is not None:
                    over(placed, None)
        for placed, failure in errors.items():
            if placed is not first or won is not None:
                over(placed, failure)
        if won is None:
            raise errors[first]
        if num_sent == 2:
            for placed in (*tasks.values(), *errors):
                self.counts[placed.backend.name, "lost"] += 1
            self.counts[won.placed.backend.name, "won"] += 1
        return won


async def _open(send: Send, placed: Placed) -> Opened:
    """Send a request and wait for the first bytes of its stream. Another answer is left unread."""
    response = await send(placed)
    try:
        if response.status == 200 and response.headers.get("content-type", "").startswith(
            "text/event-stream"
        ):
            first = b""
            with failures():
                while b"data:" not in first and (piece := await response.content.readany()):
                    first += piece  # comments are no token
            return Opened(placed, response, first)
        return Opened(placed, response)
    except BaseException:
        response.close()
        raise


async def _cancelled(tasks: dict[asyncio.Task[Opened], Placed]) -> None:
    """End attempts, also those that have just succeeded."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None:
            task.result().response.close()
