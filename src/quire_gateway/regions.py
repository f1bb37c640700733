"""`Regions`: which region gets a request. Pure: times are arguments.

    own ── no ready backend ──► away ── ready again for ``return_after_s`` ──► own
    own ── queue > ``spill_s`` ──► spilling ── queue < ``return_s`` ──► own

Away and spilling, a request goes to the region with the lowest sum of latency and predicted time to first token: away
among the others, spilling among all. The two pairs of limits keep requests from going back and forth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import Metric

from quire_gateway.fleet import Backend, Fleet
from quire_gateway.metrics import counter
from quire_gateway.region_config import RegionConfig
from quire_gateway.routing import Router
from quire_gateway.stage import Stage

Why = Literal["own", "spill", "failover"]


@dataclass(slots=True)
class _State:
    """Of one model."""

    is_away: bool = False
    is_spilling: bool = False
    back_since_s: float | None = None  # own backends are ready again


class RegionStage(Stage):
    """Has `Placing` ask `Regions` before the router."""

    def __init__(self, regions: Regions, fleet: Fleet, router: Router) -> None:
        self.regions = regions
        self._fleet = fleet
        self._router = router

    def metrics(self) -> Iterable[Metric]:
        yield counter(
            "quire:gateway_region_requests",
            "Attempts by region: own, spill or failover.",
            ("region", "why"),
            self.regions.counts,
        )

    def narrow(self, model: str, candidates: list[Backend], now: float) -> list[Backend]:
        """Return the candidates in the region that gets a request."""
        router = self._router

        def queue_s(backend: Backend) -> float:
            return router.ttft.predict(backend.number, router.loads[backend.number].queued_tokens)

        ready = [
            b
            for b in self._fleet.serving(model)
            if b.is_ready and not b.is_draining and b.breaker.state(now) != "open"
        ]
        return self.regions.among(model, candidates, ready, queue_s, now)


class Regions:
    """Narrows the candidates of a request to one region. A backend without a region is in the own one."""

    def __init__(self, config: RegionConfig) -> None:
        self._args = config.args
        self._latency_s = {name: ms / 1e3 for name, ms in config.latency_ms.items()}
        self._states: dict[str, _State] = {}
        self.counts: Counter[tuple[str, Why]] = Counter()

    def among(
        self,
        model: str,
        candidates: Sequence[Backend],
        ready: Sequence[Backend],
        queue_s: Callable[[Backend], float],
        now: float,
    ) -> list[Backend]:
        """Return the candidates of the region that gets a request.

        ``ready``: all backends that could take requests for the model, whether this request tried them or not.
        ``queue_s``: the predicted time to first token at a backend.
        """
        own, state = self._args.own, self._states.setdefault(model, _State())
        by_region: dict[str, list[Backend]] = {}
        for backend in candidates:
            by_region.setdefault(backend.args.region or own, []).append(backend)
        costs = {
            region: self._latency_s.get(region, 0.0) * (region != own) + min(map(queue_s, backends))
            for region, backends in by_region.items()
        }
        self._follow(state, any((b.args.region or own) == own for b in ready), costs, now)
        if state.is_away and len(costs) > 1:
            costs.pop(own, None)
        elif not state.is_spilling and own in costs:
            costs = {own: 0.0}
        if not costs:
            return []
        chosen = min(costs, key=lambda region: (costs[region], region != own, region))
        why: Why = (
            "own" if chosen == own else "failover" if own not in by_region or state.is_away else "spill"
        )
        self.counts[chosen, why] += 1
        return by_region[chosen]

    def _follow(self, state: _State, is_own_ready: bool, costs: Mapping[str, float], now: float) -> None:
        """Change the state of a model by what is ready and how long the queues are."""
        own = self._args.own
        if not is_own_ready:
            state.is_away, state.back_since_s = True, None
        elif state.is_away:
            state.back_since_s = now if state.back_since_s is None else state.back_since_s
            state.is_away = now - state.back_since_s < self._args.return_after_s
        if own in costs:
            limit_s = self._args.return_s if state.is_spilling else self._args.spill_s
            state.is_spilling = costs[own] > limit_s

    def shown(self) -> dict[str, str]:
        """Return the state of each model, for operators."""
        return {
            model: "away" if state.is_away else "spilling" if state.is_spilling else "own"
            for model, state in self._states.items()
        }
