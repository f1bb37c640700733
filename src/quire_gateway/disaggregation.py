"""`Disaggregation`: a prompt is computed by a prefill replica, and answered by a decode replica that takes its blocks.

    open     a request was placed at a decode replica: a prefill replica is asked first, where that is predicted to pay
    prepare  what either of them gets: ``kv_transfer_params`` of the first call, or those of its answer

It is an optimization of one attempt: whatever becomes of the first call, the second one is sent, and computes what it
does not find. Requests go to prefill replicas as a whole only where no other replica can take them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client.core import Metric

from quire_gateway.config import DisaggregationArgs, GatewayConfig
from quire_gateway.exchange import Exchange
from quire_gateway.fleet import Backend, Fleet
from quire_gateway.metrics import counter
from quire_gateway.placing import Placed, Placing
from quire_gateway.routing import Demand, Router
from quire_gateway.sending import Opened, Outgoing
from quire_gateway.stage import Open, Stage
from quire_gateway.upstream import BackendFailed, closing, failures, read_reply

FIELD = "kv_transfer_params"
_FIRST = msgspec.Raw(b'{"do_remote_decode":true}')
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(slots=True)
class _Calls:
    """The first call of a request, and the params that it gave for the second one."""

    prefill: Placed
    params: msgspec.Raw | None = None


class Disaggregation(Stage):
    """Which requests have two calls, and what came of the first."""

    paths = ("/v1/completions", "/v1/chat/completions")

    def __init__(
        self, config: GatewayConfig, fleet: Fleet, router: Router, placing: Placing,
        count_failure: Callable[[Backend, BackendFailed], None], now: Callable[[], float],
        *, min_tokens: int = 512, max_slowdown: float = 2.0,
    ) -> None:  # fmt: skip
        """``min_tokens``: where the configuration has none.

        ``max_slowdown``: a prompt stays where prefill replicas are predicted to take so many times as long.
        """
        args = config.disaggregation or DisaggregationArgs()
        self._min_tokens, self._max_slowdown = args.min_tokens or min_tokens, max_slowdown
        self._timeout_s = args.timeout_s or 0.1 * config.timeouts.total_s
        self._fleet, self._router, self._placing = fleet, router, placing
        self._count_failure, self._now = count_failure, now
        self._narrow = placing.narrow
        self._calls: dict[Exchange, _Calls] = {}
        # (backend, computed | failed) of first calls
        self.counts: Counter[tuple[str, str]] = Counter()

    def metrics(self) -> Iterable[Metric]:
        yield counter(
            "quire:gateway_prefills",
            "Prompts that a prefill replica was asked to compute for another one: computed or failed.",
            ("backend", "result"),
            self.counts,
        )

    def narrow(self, model: str, candidates: list[Backend], now: float) -> list[Backend]:
        """Return the candidates without prefill replicas, unless there are no others."""
        others = [backend for backend in candidates if backend.args.role != "prefill"] or candidates
        return others if self._narrow is None else self._narrow(model, others, now)

    async def open(self, exchange: Exchange, proceed: Open, placed: Placed) -> Opened:
        """Have the prompt computed first, where that pays."""
        if exchange not in self._calls and (prefill := self._place(exchange, placed)) is not None:
            calls = self._calls[exchange] = _Calls(prefill)
            self._router.started(placed.id)  # this replica computes next to nothing of the prompt
            calls.params = await self._compute(proceed, prefill)
            placed.placed_s = self._now()
        return await proceed(placed)

    def prepare(self, outgoing: Outgoing) -> None:
        """Add what makes a call the first or the second."""
        calls = self._calls.get(outgoing.exchange)
        if calls is None or outgoing.exchange.answer.has_begun:  # a stream that goes on has a body of its own
            return
        params = _FIRST if outgoing.placed is calls.prefill else calls.params
        if params is not None:
            outgoing.body = msgspec.json.encode(_fields(outgoing.body) | {FIELD: params})

    async def after(self, exchange: Exchange, now: float) -> None:
        """Forget the request."""
        self._calls.pop(exchange, None)

    def _place(self, exchange: Exchange, placed: Placed) -> Placed | None:
        """Choose a prefill replica, and count the prompt there; None where the decode replica does better alone."""
        request, model = exchange.request, placed.target.model
        assert request is not None
        prompt = request.body.get("prompt")
        has_many = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        uncached = self._router.uncached(placed.id)
        if placed.backend.args.role != "decode" or uncached < self._min_tokens or has_many:
            return None
        if exchange.answer.has_begun or FIELD in request.body:
            return None
        now = self._now()
        ready = {
            b.number: b for b in self._fleet.candidates(model, now) if b.args.role == "prefill" and b.is_ready
        }
        pace_s, loads, own = self._router.ttft.pace_s, self._router.loads, placed.backend.number
        limit_s = self._max_slowdown * pace_s(own) * loads[own].queued_tokens  # its own tokens included
        quick = {n: b for n, b in ready.items() if pace_s(n) * (loads[n].queued_tokens + uncached) <= limit_s}
        num_tokens = self._placing.num_tokens(request, model)
        call_id = f"{placed.id}/prefill"
        number = self._router.route(call_id, Demand(list(exchange.attempts.chain), num_tokens, 0), quick)
        if number is None:
            return None
        ready[number].breaker.taken(now)
        return Placed(call_id, ready[number], placed.target, now, self._router.predicted_s(call_id))

    async def _compute(self, proceed: Open, prefill: Placed) -> msgspec.Raw | None:
        """Make the first call, and return what the second one is told; None: it has failed."""
        backend, is_good, params = prefill.backend, None, None
        try:
            async with asyncio.timeout(self._timeout_s):
                params = await self._unless_lost(proceed, prefill)
            is_good = True
        except (BackendFailed, TimeoutError) as failure:
            error = (
                failure
                if isinstance(failure, BackendFailed)
                else BackendFailed("timeout", "It took too long.")
            )
            is_good = False if error.blames_backend else None
            self._count_failure(backend, error)
        finally:
            self.counts[backend.name, "computed" if params is not None else "failed"] += 1
            if is_good:
                self._placing.started(prefill)
            self._placing.ended(prefill, is_good)
        return params

    async def _unless_lost(self, proceed: Open, prefill: Placed) -> msgspec.Raw | None:
        """Return the params of the first call's answer. Raises `BackendFailed`, also where polls find it lost."""
        call, backend, this = (
            asyncio.create_task(_first_call(proceed, prefill)),
            prefill.backend,
            asyncio.current_task(),
        )
        assert this is not None

        def leave() -> None:
            call.cancel()

        backend.watchers.add(leave)
        try:
            return await call
        except asyncio.CancelledError:
            if this.cancelling():  # the client has left, or the time is over
                raise
            raise BackendFailed("unready", "The prefill replica is lost.") from None
        finally:
            backend.watchers.discard(leave)
            call.cancel()


async def _first_call(proceed: Open, prefill: Placed) -> msgspec.Raw | None:
    opened = await proceed(prefill)
    with closing(opened.response):
        reply = await read_reply(opened.response, 1 << 20)
    if reply.status >= 500:
        raise BackendFailed("status", f"The prefill replica answered {reply.status}.", reply)
    if reply.status != 200:
        return None  # the decode replica is to say what is wrong with the request
    with failures():
        params: Any = _fields(reply.body).get(FIELD)
        return params if params is None else msgspec.Raw(params)
