"""`Hedging`: a request whose answer is late is asked of a second backend too; the first answer wins.

That is the first token of a stream, and the head of any other answer, which backends send once the answer is whole. An
attempt that is refused, or fails, does not win while the other one is running. The one that lost is cancelled, which
ends its work. Both have the same id and seed, so that replicas of Quire answer alike. The ledger has one row, of the
attempt that won; what the other one used is counted as waste.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from prometheus_client.core import Metric

from quire.args import defaults
from quire_gateway.config import HedgeArgs, RetryArgs
from quire_gateway.exchange import Exchange
from quire_gateway.fleet import Backend
from quire_gateway.frames import has_event, is_stream
from quire_gateway.headers import to_client
from quire_gateway.metrics import counter
from quire_gateway.placing import Placed, Placing
from quire_gateway.retries import RetryBudget
from quire_gateway.sending import Opened
from quire_gateway.stage import Open, Stage
from quire_gateway.upstream import RETRIED_STATUS, BackendFailed, Reply, failures

# Called when an attempt has ended that did not win: it failed, or it was cancelled (None).
Lost = Callable[[Placed, BackendFailed | None], None]


class Hedging(Stage):
    """Which requests are hedged, and what came of them."""

    def __init__(
        self, args: HedgeArgs, placing: Placing, count_failure: Callable[[Backend, BackendFailed], None]
    ) -> None:
        self._args = args
        self._placing = placing
        self._count_failure = count_failure
        self.budget = RetryBudget(args.budget, defaults(RetryArgs)["reserve"])
        # (backend, won | lost) of requests with two attempts
        self.counts: Counter[tuple[str, str]] = Counter()
        # (backend,): estimated prompt tokens of attempts that lost
        self.waste: Counter[tuple[str]] = Counter()

    def metrics(self) -> Iterable[Metric]:
        yield counter(
            "quire:gateway_hedges",
            "Attempts of hedged requests, by backend: won or lost.",
            ("backend", "result"),
            self.counts,
        )
        yield counter(
            "quire:gateway_hedge_waste_tokens",
            "Prompt tokens of attempts that lost, as estimated.",
            ("backend",),
            self.waste,
        )

    async def open(self, exchange: Exchange, proceed: Open, placed: Placed) -> Opened:
        """Make an attempt, and a second one at another backend where the first is slow."""
        request, answer, attempts = exchange.request, exchange.answer, exchange.attempts
        assert request is not None
        num_tokens = self._placing.num_tokens(request, placed.target.model)
        after_s = None if answer.has_begun else self._after_s(request.streams, num_tokens)
        if after_s is None:
            return await proceed(placed)
        headers, targets = answer.route_headers, exchange.targets

        def another() -> Placed | None:
            attempts.tried.add((placed.backend.life, placed.target.model))
            attempts.num += 1
            exchange.targets = [placed.target]  # the same model
            second = self._placing.place(exchange)
            exchange.targets = targets
            if second is not None:
                attempts.watch(second.backend)
            return second

        def lost(attempt: Placed, error: BackendFailed | None) -> None:
            attempts.unwatch(attempt.backend)
            self._placing.ended(attempt, False if error is not None and error.blames_backend else None)
            if error is not None:
                attempts.tried.add((attempt.backend.life, attempt.target.model))
                self._count_failure(attempt.backend, error)

        opened = await self._race(placed, proceed, another, lost, num_tokens, after_s)
        if opened.placed is placed:
            answer.route_headers = headers
        return opened

    def _after_s(self, streams: bool, num_prompt_tokens: int) -> float | None:
        """Return the seconds after which a request may have a second attempt; None: never."""
        self.budget.earn()
        if num_prompt_tokens > self._args.max_prompt_tokens:
            return None
        return self._args.after_s if streams else self._args.whole_after_s

    async def _race(
        self,
        first: Placed,
        send: Open,
        another: Callable[[], Placed | None],
        lost: Lost,
        num_prompt_tokens: int,
        after_s: float,
    ) -> Opened:
        """Send a request, and send it again to ``another`` backend if no answer comes within ``after_s``.

        Raises:
            BackendFailed: no attempt succeeded; the error is that of the first one, for which ``lost`` is not called.
        """
        tasks = {asyncio.create_task(_open(send, first)): first}
        num_sent, errors = 1, dict[Placed, BackendFailed]()
        won: Opened | None = None
        try:
            await asyncio.wait(tasks, timeout=after_s)
            if not next(iter(tasks)).done() and self.budget.take() and (second := another()) is not None:
                tasks[asyncio.create_task(_open(send, second))] = second
                num_sent = 2
            while tasks and won is None:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done if won is None else ():
                    placed = tasks.pop(task)
                    try:
                        opened = task.result()
                        if opened.response.status not in RETRIED_STATUS or not tasks:
                            won = opened
                            break
                        errors[placed] = _refused(opened)
                    except BackendFailed as error:
                        errors[placed] = error
        finally:
            await _cancelled(tasks)
            for placed in tasks.values():
                self.waste[(placed.backend.name,)] += num_prompt_tokens if won is not None else 0
                if placed is not first or won is not None:
                    lost(placed, None)
        for placed, failure in errors.items():
            if placed is not first or won is not None:
                lost(placed, failure)
        if won is None:
            raise errors[first]
        if num_sent == 2:
            for placed in (*tasks.values(), *errors):
                self.counts[placed.backend.name, "lost"] += 1
            self.counts[won.placed.backend.name, "won"] += 1
        return won


def _refused(opened: Opened) -> BackendFailed:
    """Close the answer of an attempt that another one may still better."""
    opened.response.close()
    status = opened.response.status
    headers = [pair for pair in to_client(opened.response.raw_headers) if pair[0] == b"retry-after"]
    return BackendFailed("status", f"The backend answered {status}.", Reply(status, headers, b""))


async def _open(send: Open, placed: Placed) -> Opened:
    """Send a request and wait for the first bytes of its stream. Another answer is left unread."""
    opened = await send(placed)
    response = opened.response
    try:
        if response.status == 200 and is_stream(response.headers.get("content-type", "")):
            first = b""
            with failures():
                while not has_event(first) and (piece := await response.content.readany()):
                    first += piece  # comments are no token
            return replace(opened, first=first)
        return opened
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
