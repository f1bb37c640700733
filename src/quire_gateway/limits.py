"""Limits per key, tenant and model: requests and tokens per minute, requests at once, budgets in tokens and in money.

A request reserves what it may use at most (prompt + max_tokens) before a model is touched, all of its quotas or none,
and is settled with what it used. Three kinds of quota:

    rate        a token bucket: `capacity` may be used at once, and comes back within a minute, evenly
    budget      `capacity` per calendar day or month (UTC)
    concurrent  `capacity` requests at once

What a request holds of a budget or of the requests at once is a lease: `LEASE_S` after its gateway last renewed it, the
request stops counting. A killed gateway thus gives back what its requests had reserved. When it starts again, it
charges the budgets with what they used (`quire_gateway.booking`).

The books are kept in this process (`MemoryStore`) or, for several gateways, in Redis (`quire_gateway.redis_store`).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from quire.clock import Clock
from quire_gateway.quotas import Limit, Quota, Unit, Usage

MINUTE_S = 60.0
LEASE_S = 60.0


@dataclass(frozen=True, slots=True)
class Charge:
    quota: Quota
    key: str  # of its books
    amount: int


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a quota has left after a decision, and the seconds until all of it is back."""

    quota: Quota
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """Granted, or denied by the quota that is back last, with the seconds until the same request would be granted."""

    allowances: tuple[Allowance, ...]
    denied: Quota | None = None
    retry_after_s: float = 0.0  # infinite: the request alone is larger than the quota


@dataclass(slots=True)
class Reservation:
    """What a request holds until it is settled."""

    request_id: str
    charges: list[Charge] = field(default_factory=list)


class Store(Protocol):
    """The books. `MemoryStore` and `RedisStore` decide alike."""

    @property
    def is_degraded(self) -> bool:
        """Whether they are this process's own for now."""

    async def take(self, request_id: str, charges: Sequence[Charge]) -> Decision:
        """Add all charges to the books, or none where one of them does not fit."""
        ...

    async def settle(self, request_id: str, charges: Sequence[Charge], used: Sequence[int]) -> None:
        """Replace what a request has taken by ``used``, whatever the capacity, and end its leases."""
        ...

    async def recover(
        self, request_id: str, charges: Sequence[Charge], used: Sequence[int], *, if_held: bool
    ) -> None:
        """The same for the budgets of a request whose gateway was killed; its charges may have been given back.

        ``if_held``: only if they have not: the gateway may have settled the request before it was killed.
        """
        ...

    async def renew(self, leases: Sequence[tuple[str, Charge]]) -> None:
        """Keep what requests (by id) that still run have taken of quotas with leases."""
        ...


class MemoryStore:
    """The books of one gateway. Rates follow ``clock``, which no change of the system's time moves."""

    is_degraded = False

    def __init__(self, clock: Clock, wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._wall = wall
        self._levels: dict[str, tuple[float, float]] = {}  # rate: used, at which time
        self._used: dict[str, int] = {}  # budget
        self._leases: defaultdict[str, dict[str, float]] = defaultdict(dict)  # request → end of the lease

    async def take(self, request_id: str, charges: Sequence[Charge]) -> Decision:
        now, wall = self._clock.now(), self._wall()
        used = [self._level(charge, now) for charge in charges]
        decision = decide(charges, used, wall)
        if decision.denied is None:
            for charge, level in zip(charges, used, strict=True):
                self._put(request_id, charge, level + charge.amount, now)
            self._forget(wall)
        return decision

    async def settle(self, request_id: str, charges: Sequence[Charge], used: Sequence[int]) -> None:
        now = self._clock.now()
        for charge, amount in zip(charges, used, strict=True):
            if charge.quota.period == "concurrent":
                self._leases[charge.key].pop(request_id, None)
            elif amount != charge.amount:
                level = self._level(charge, now) + amount - charge.amount
                self._put(request_id, charge, max(0.0, level), now)

    async def recover(
        self, request_id: str, charges: Sequence[Charge], used: Sequence[int], *, if_held: bool
    ) -> None:
        """The books of a process that was killed are gone, and with them what its requests held."""
        if not if_held:
            await self.settle(request_id, charges, used)

    async def renew(self, leases: Sequence[tuple[str, Charge]]) -> None:
        end = self._clock.now() + LEASE_S
        for request_id, charge in leases:
            if charge.quota.period == "concurrent":
                self._leases[charge.key][request_id] = end

    def _level(self, charge: Charge, now: float) -> float:
        quota = charge.quota
        match quota.period:
            case "minute":
                used, at = self._levels.get(charge.key, (0.0, now))
                return max(0.0, used - (now - at) * quota.capacity / MINUTE_S)
            case "concurrent":
                leases = self._leases[charge.key]
                for request_id in [request for request, end in leases.items() if end <= now]:
                    del leases[request_id]
                return len(leases)
            case _:
                return self._used.get(charge.key, 0)

    def _put(self, request_id: str, charge: Charge, level: float, now: float) -> None:
        match charge.quota.period:
            case "minute":
                self._levels[charge.key] = (level, now)
            case "concurrent":
                self._leases[charge.key][request_id] = now + LEASE_S
            case _:
                self._used[charge.key] = round(level)

    def _forget(self, wall: float) -> None:
        """Drop the budgets of past periods, once there are many."""
        if len(self._used) > 10_000:
            month = f"{datetime.fromtimestamp(wall, UTC):%Y-%m}"
            self._used = {k: v for k, v in self._used.items() if k.rpartition(":")[2].startswith(month)}


def decide(charges: Sequence[Charge], used: Sequence[float], wall_s: float) -> Decision:
    """Return whether all ``charges`` fit beside what is ``used`` of their quotas."""
    denied, wait = None, 0.0
    for charge, level in zip(charges, used, strict=True):
        if level + charge.amount > charge.quota.capacity:
            seconds = _wait_s(charge, level, wall_s)
            if denied is None or seconds > wait:
                denied, wait = charge.quota, seconds
    allowances = tuple(
        _allowance(charge, level if denied else level + charge.amount, wall_s)
        for charge, level in zip(charges, used, strict=True)
    )
    return Decision(allowances, denied, wait)


def _wait_s(charge: Charge, level: float, wall_s: float) -> float:
    quota = charge.quota
    if charge.amount > quota.capacity:
        return math.inf
    match quota.period:
        case "minute":
            return (level + charge.amount - quota.capacity) * MINUTE_S / quota.capacity
        case "concurrent":
            return 1.0
        case _:
            return quota.reset_s(wall_s)


def _allowance(charge: Charge, level: float, wall_s: float) -> Allowance:
    quota = charge.quota
    remaining = max(0, math.floor(quota.capacity - level))
    match quota.period:
        case "minute":
            return Allowance(quota, remaining, level * MINUTE_S / quota.capacity if quota.capacity else 0.0)
        case "concurrent":
            return Allowance(quota, remaining, 0.0)
        case _:
            return Allowance(quota, remaining, quota.reset_s(wall_s))


@dataclass(frozen=True, slots=True)
class LimitTable:
    """Which limits hold for whom. An owner without a limit of its own has ``default``, by key."""

    default: Limit = field(default_factory=Limit)
    keys: Mapping[str, Limit] = field(default_factory=dict)
    tenants: Mapping[str, Limit] = field(default_factory=dict)
    models: Mapping[str, Limit] = field(default_factory=dict)  # of each tenant at this model

    def quotas(self, key: str, tenant: str, model: str) -> list[Quota]:
        """Return all quotas that a request of ``key`` for ``model`` counts against."""
        quotas = self.keys.get(key, self.default).quotas(f"key/{key}")
        if tenant in self.tenants:
            quotas += self.tenants[tenant].quotas(f"tenant/{tenant}")
        if model in self.models:
            quotas += self.models[model].quotas(f"tenant/{tenant}/{model}")
        return quotas


class Limits:
    """Reserves before a model is touched, settles after; keeps the leases of what is open."""

    def __init__(self, table: LimitTable, store: Store, wall: Callable[[], float] = time.time) -> None:
        self._table = table
        self._store = store
        self._wall = wall
        self._open: dict[str, Reservation] = {}

    async def reserve(
        self, request_id: str, key: str, tenant: str, model: str, most: Usage
    ) -> tuple[Reservation | None, Decision]:
        """Reserve ``most``. No reservation: the decision says which quota is used up, and for how long."""
        quotas = self._table.quotas(key, tenant, model)
        wall = self._wall()
        charges = [Charge(quota, quota.key(wall), most.of(quota.unit)) for quota in quotas]
        if not charges:
            return Reservation(request_id), Decision(())
        decision = await self._store.take(request_id, charges)
        if decision.denied is not None:
            return None, decision
        self._open[request_id] = reservation = Reservation(request_id, charges)
        return reservation, decision

    async def settle(self, reservation: Reservation, used: Usage | None) -> None:
        """Replace what was reserved by what was ``used``; None: the model was not touched, and nothing counts."""
        self._open.pop(reservation.request_id, None)
        if charges := reservation.charges:
            amounts = [0 if used is None else used.of(charge.quota.unit) for charge in charges]
            await self._store.settle(reservation.request_id, charges, amounts)

    async def recover(
        self, request_id: str, owner: tuple[str, str, str], wall_s: float, used: Usage, *, if_held: bool
    ) -> None:
        """Charge the budgets for a request of a gateway that was killed, in place of what it had reserved.

        ``owner``: its key, tenant and model; ``wall_s``: when it reserved; ``if_held``: see `Store.recover`.
        """
        quotas = [quota for quota in self._table.quotas(*owner) if quota.is_budget]
        if quotas:
            charges = [Charge(quota, quota.key(wall_s), 0) for quota in quotas]
            amounts = [used.of(quota.unit) for quota in quotas]
            await self._store.recover(request_id, charges, amounts, if_held=if_held)

    @property
    def is_degraded(self) -> bool:
        return self._store.is_degraded

    async def allowances(self, owners: Iterable[tuple[str, str]], models: Sequence[str]) -> list[Allowance]:
        """Return what (key, tenant) each have left of their quotas, with those of each tenant at ``models``."""
        wall, quotas = self._wall(), {}
        for key, tenant in owners:
            for model in models or [""]:
                quotas.update({quota.name: quota for quota in self._table.quotas(key, tenant, model)})
        charges = [Charge(q, q.key(wall), 0) for q in quotas.values() if q.period != "concurrent"]
        decision = await self._store.take("", charges) if charges else Decision(())
        open_keys = [charge.key for reservation in self._open.values() for charge in reservation.charges]
        places = [
            Allowance(q, max(0, q.capacity - open_keys.count(q.key(wall))), 0.0)
            for q in quotas.values()
            if q.period == "concurrent"
        ]
        return sorted([*decision.allowances, *places], key=lambda allowance: allowance.quota.name)

    async def budget_left(self, key: str, tenant: str) -> float:
        """Return the smallest share (0…1) that a key and its tenant have left of their budgets; 1 without any."""
        allowances = await self.allowances([(key, tenant)], [])
        budgets = [allowance for allowance in allowances if allowance.quota.is_budget]
        return min((budget.remaining / max(budget.quota.capacity, 1) for budget in budgets), default=1.0)

    async def renew(self) -> None:
        """Renew the leases of the open requests: to be called at least every `LEASE_S` / 3."""
        leases = [
            (request_id, charge)
            for request_id, reservation in self._open.items()
            for charge in reservation.charges
            if charge.quota.period != "minute"
        ]
        if leases:
            await self._store.renew(leases)


def limit_headers(allowances: Iterable[Allowance]) -> list[tuple[bytes, bytes]]:
    """Return OpenAI's ``x-ratelimit-*`` headers for the tightest quota per minute of each unit."""
    tightest: dict[str, Allowance] = {}
    for allowance in allowances:
        if allowance.quota.period != "minute":
            continue
        name = {Unit.INPUT: "input-tokens", Unit.OUTPUT: "output-tokens"}.get(
            allowance.quota.unit, str(allowance.quota.unit)
        )
        if name not in tightest or allowance.remaining < tightest[name].remaining:
            tightest[name] = allowance
    headers = []
    for name, allowance in tightest.items():
        headers += [
            (f"x-ratelimit-limit-{name}".encode(), str(allowance.quota.capacity).encode()),
            (f"x-ratelimit-remaining-{name}".encode(), str(allowance.remaining).encode()),
            (f"x-ratelimit-reset-{name}".encode(), f"{allowance.reset_s:.3f}s".encode()),
        ]
    return headers
