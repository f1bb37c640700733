"""`Placing`: which backend gets a request, by health, targets and the routing policy; the seam to `Router`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from quire.text.digest import digests, root_of
from quire_gateway.attempts import Attempts
from quire_gateway.catalog import Target
from quire_gateway.client_request import ClientRequest
from quire_gateway.config import Cause
from quire_gateway.exchange import Exchange
from quire_gateway.fleet import Backend, Fleet
from quire_gateway.routing import Demand, Router
from quire_gateway.ttft import MIN_OBSERVED
from quire_gateway.usage import BYTES_PER_TOKEN

_LEARNING = 0.05  # weight of one answer in a model's ratio
_LATE_S = 1.0


# (model, candidates, now) → the candidates among which the router chooses
Narrow = Callable[[str, list[Backend], float], list[Backend]]


@dataclass(slots=True, eq=False)
class Placed:
    """One attempt at one backend."""

    id: str  # in the router
    backend: Backend
    target: Target
    placed_s: float
    predicted_s: float  # time to first token
    is_first: bool = True  # no request of this gateway waited there for its first token
    is_late: bool = False  # the first token came far later than that


class Placing:
    """Places requests, and reports to the router what came of them."""

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        piece_bytes: int,
        now: Callable[[], float],
        pays: Callable[[Attempts, str], bool],
    ) -> None:
        """``pays``: whether a request may have another attempt at a model that it owes one; see `Retrying`."""
        self.narrow: Narrow | None = None  # set by `Regions`
        self._pays = pays
        self._fleet = fleet
        self._router = router
        self._piece_bytes = piece_bytes
        self._now = now
        self._bytes_per_token: dict[str, float] = {}

    def place(self, exchange: Exchange) -> Placed | None:
        """Choose a backend for the next attempt and count the request there until `ended`; None where none is left."""
        attempts, now = exchange.attempts, self._now()
        target, candidates = self._target(exchange, now)
        if target is None:
            return None
        holding = [b for b in candidates if b.name == attempts.holder]
        if holding:
            candidates = holding
        elif self.narrow is not None:
            candidates = self.narrow(target.model, candidates, now)
        demand = self._demand(exchange, target.model)
        attempts.chain = demand.chain
        among = {b.number: b for b in candidates}
        exchange.answer.route_headers = [self._explanation(demand, among)] if exchange.explains else []
        attempt_id = f"{exchange.request_id}/{id(exchange):x}/{attempts.num}"
        number = self._router.route(attempt_id, demand, among)
        assert number is not None
        backend, is_first = among[number], self._router.loads[number].pending == 1
        backend.breaker.taken(now)
        if exchange.explains:
            exchange.answer.route_headers.append((b"x-quire-backend", backend.name.encode()))
        if target.is_fallback:
            exchange.answer.route_headers.append((b"x-quire-fallback-model", target.model.encode()))
        return Placed(attempt_id, backend, target, now, self._router.predicted_s(attempt_id), is_first)

    def may_come(self, exchange: Exchange) -> bool:
        """Whether a replica may come that can take the request; those that died may be tried again then."""
        if exchange.answer.has_begun:
            exchange.attempts.tried.clear()
            return exchange.can_move
        failure = exchange.attempts.failure
        if failure is None or not failure.tells_of_death:
            return False
        names = {target.model for target in exchange.targets}
        there = [b for name in names for b in self._fleet.serving(name)]
        return not there or any(not b.is_ready or b.is_suspect for b in there)

    def may_leave(self, exchange: Exchange, placed: Placed) -> bool:
        """Whether a ready backend could take the request from one that is dead or hung.

        It must have answered a poll since the silence began: else this process may be what is slow.
        """
        model, lost = placed.target.model, placed.backend
        return any(
            b is not lost
            and b.is_ready
            and (b.answered_s >= lost.missed_s or not lost.is_silent)
            and not b.is_draining
            and (b.life, model) not in exchange.attempts.tried
            and exchange.may_go_to(b, model)
            for b in self._fleet.serving(model)
        )

    def started(self, placed: Placed) -> None:
        """The first token came."""
        ttft_s = self._now() - placed.placed_s
        observed = self._router.ttft.num_observed(placed.backend.number)
        limit_s = max(_LATE_S, self._fleet.health.slow_factor * placed.predicted_s)
        # Behind others it waits for their outputs too, which no prediction knows: a long queue is no failure.
        placed.is_late = placed.is_first and observed >= MIN_OBSERVED and ttft_s > limit_s
        self._router.started(placed.id, ttft_s)

    def ended(self, placed: Placed, is_good: bool | None) -> None:
        """The attempt has ended. ``is_good``: what it says of the backend's health; None: nothing."""
        self._router.finished(placed.id)
        breaker, now = placed.backend.breaker, self._now()
        if is_good is None:
            breaker.withdrawn()
        elif is_good and not placed.is_late:
            breaker.succeeded(now)
        else:
            breaker.failed(now)

    def learn(self, request: ClientRequest, model: str, num_prompt_tokens: int) -> None:
        """An answer says how many tokens the text of its prompt has."""
        if num_prompt_tokens > 0 and request.text:
            ratio = len(request.text) / num_prompt_tokens
            before = self._bytes_per_token.get(model, ratio)
            self._bytes_per_token[model] = before + _LEARNING * (ratio - before)

    def num_tokens(self, request: ClientRequest, model: str) -> int:
        """Return the prompt tokens of a request by the model's bytes per token."""
        return int(len(request.text) / self._bytes_per_token.get(model, BYTES_PER_TOKEN)) + 1

    def _target(self, exchange: Exchange, now: float) -> tuple[Target | None, list[Backend]]:
        """Return the first target with a backend that may be tried.

        A fallback is taken for its causes: those of attempts that failed, and those for which the targets before it
        have no backend now. It is not paid for, a further attempt at the same model is.
        """
        if exchange.answer.has_begun and exchange.target is not None:
            ready = self._fleet.candidates(exchange.target.model, now, exchange.attempts.tried)
            fit = [b for b in ready if exchange.may_go_to(b, exchange.target.model)]
            return (exchange.target, fit) if fit else (None, [])
        causes = set(exchange.attempts.causes)
        for target in exchange.targets:
            model = target.model
            if model in exchange.attempts.closed or (target.is_fallback and not target.when & causes):
                continue
            candidates = self._fleet.candidates(model, now, exchange.attempts.tried, exchange.attempts.holder)
            if candidates and (model not in exchange.attempts.owed or self._pays(exchange.attempts, model)):
                return target, candidates
            if not candidates:
                causes |= self._why_none(exchange, model)
        return None, []

    def _why_none(self, exchange: Exchange, model: str) -> set[Cause]:
        """Return why no backend of a model can be tried: those left have no room, none is up, or all were tried."""
        up = [b for b in self._fleet.serving(model) if b.is_ready and not b.is_draining]
        if not up:
            return {"failure"}
        return {"saturated"} if any((b.life, model) not in exchange.attempts.tried for b in up) else set()

    def _demand(self, exchange: Exchange, model: str) -> Demand:
        request, chain = exchange.request, list[bytes]()
        assert request is not None
        if self._router.needs_chains:
            salt = request.body.get("cache_salt")
            salt = salt if isinstance(salt, str) else ""
            root = root_of(model, salt if request.salt is None else request.salt)
            chain = digests(root, request.text, self._piece_bytes)
        return Demand(chain, self.num_tokens(request, model), request.num_output_tokens, request.session)

    def _explanation(self, demand: Demand, among: dict[int, Backend]) -> tuple[bytes, bytes]:
        scores = self._router.explain(demand, among)
        named = {among[number].name: score for number, score in scores.items()}
        value = {"policy": self._router.policy, "pieces": len(demand.chain), "backends": named}
        return b"x-quire-route", msgspec.json.encode(value)
