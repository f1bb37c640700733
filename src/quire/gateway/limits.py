"""Limits per key, tenant and model: requests and tokens per minute, requests at once, budgets in tokens and in money.

A request reserves what it may use at most (prompt + max_tokens) before a model is touched, all of its quotas or none,
and is settled with what it used. Three kinds of quota:

    rate        a token bucket: `capacity` may be used at once, and comes back within a minute, evenly
    budget      `capacity` per calendar day or month (UTC)
    concurrent  `capacity` requests at once; a request that its gateway no longer renews stops counting after `LEASE_S`

The books are kept in this process (`MemoryStore`) or, for several gateways, in Redis (`quire.gateway.redis_store`).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Protocol

from quire.clock import Clock

MINUTE_S = 60.0
LEASE_S = 60.0
NANO = 1_000_000_000  # of the currency: money is counted in whole billionths


class Unit(StrEnum):
    """What a quota counts."""

    REQUESTS = "requests"
    INPUT = "input_tokens"
    OUTPUT = "output_tokens"
    TOKENS = "tokens"
    MONEY = "money"


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request may use, or has used. Input tokens include the cached ones."""

    input_tokens: int = 0
    output_tokens: int = 0
    money_nano: int = 0

    def of(self, unit: Unit) -> int:
        match unit:
            case Unit.REQUESTS:
                return 1
            case Unit.INPUT:
                return self.input_tokens
            case Unit.OUTPUT:
                return self.output_tokens
            case Unit.TOKENS:
                return self.input_tokens + self.output_tokens
            case Unit.MONEY:
                return self.money_nano


@dataclass(frozen=True, slots=True)
class Limit:
    """The limits of one key, tenant or model, as the configuration has them; None is no limit. Money is in units."""

    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    money_per_day: float | None = None
    money_per_month: float | None = None

    def quotas(self, owner: str) -> list[Quota]:
        """Return the quotas that ``owner`` ("tenant/research") has by this limit."""
        found = []
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None:
                unit, period = _MEANING[each.name]
                capacity = round(value * NANO) if unit is Unit.MONEY else value
                found.append(Quota(f"{owner}/{each.name}", unit, period, capacity))
        return found


_MEANING: dict[str, tuple[Unit, str]] = {
    "requests_per_minute": (Unit.REQUESTS, "minute"),
    "input_tokens_per_minute": (Unit.INPUT, "minute"),
    "output_tokens_per_minute": (Unit.OUTPUT, "minute"),
    "tokens_per_minute": (Unit.TOKENS, "minute"),
    "concurrent_requests": (Unit.REQUESTS, "concurrent"),
    "tokens_per_day": (Unit.TOKENS, "day"),
    "tokens_per_month": (Unit.TOKENS, "month"),
    "money_per_day": (Unit.MONEY, "day"),
    "money_per_month": (Unit.MONEY, "month"),
}


@dataclass(frozen=True, slots=True)
class Quota:
    """One limit of one owner."""

    name: str  # "tenant/research/tokens_per_minute"
    unit: Unit
    period: str  # minute | day | month | concurrent
    capacity: int

    def key(self, wall_s: float) -> str:
        """Return the name of its books, which for a budget are those of the day or month of ``wall_s`` (Unix time)."""
        if self.period not in ("day", "month"):
            return self.name
        day = datetime.fromtimestamp(wall_s, UTC)
        return f"{self.name}:{day:%Y-%m-%d}" if self.period == "day" else f"{self.name}:{day:%Y-%m}"

    def reset_s(self, wall_s: float) -> float:
        """Return the seconds until a budget starts again."""
        now = datetime.fromtimestamp(wall_s, UTC)
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
        if self.period == "day":
            return (midnight + timedelta(days=1) - now).total_seconds()
        return ((midnight.replace(day=1) + timedelta(days=32)).replace(day=1) - now).total_seconds()


@dataclass(frozen=True, slots=True)
class Charge:
    quota: Quota
    key: str  # of its books
    amount: int


@dataclass(frozen=True, slots=True)
class Left:
    """What a quota has left after a decision, and the seconds until all of it is back."""

    quota: Quota
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """Granted, or denied by the quota that is back last, with the seconds until the same request would be granted."""

    left: tuple[Left, ...]
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

    async def change(self, request_id: str, changes: Sequence[Charge]) -> None:
        """Add ``changes`` (which may be negative) whatever the capacity, and end the request's concurrent leases."""
        ...

    async def renew(self, request_ids: Sequence[str], keys: Sequence[str]) -> None:
        """Keep the leases of requests that still run; ``keys[i]`` is of ``request_ids[i]``."""
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

    async def change(self, request_id: str, changes: Sequence[Charge]) -> None:
        now = self._clock.now()
        for charge in changes:
            if charge.quota.period == "concurrent":
                self._leases[charge.key].pop(request_id, None)
            else:
                self._put(request_id, charge, max(0.0, self._level(charge, now) + charge.amount), now)

    async def renew(self, request_ids: Sequence[str], keys: Sequence[str]) -> None:
        end = self._clock.now() + LEASE_S
        for request_id, key in zip(request_ids, keys, strict=True):
            self._leases[key][request_id] = end

    def _level(self, charge: Charge, now: float) -> float:
        quota = charge.quota
        match quota.period:
            case "minute":
                used, at = self._levels.get(charge.key, (0.0, now))
                return max(0.0, used - (now - at) * quota.capacity / MINUTE_S)
            case "concurrent":
                leases = self._leases[charge.key]
                for request_id in [each for each, end in leases.items() if end <= now]:
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
    left = tuple(
        _left(charge, level if denied else level + charge.amount, wall_s)
        for charge, level in zip(charges, used, strict=True)
    )
    return Decision(left, denied, wait)


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


def _left(charge: Charge, level: float, wall_s: float) -> Left:
    quota = charge.quota
    remaining = max(0, math.floor(quota.capacity - level))
    match quota.period:
        case "minute":
            return Left(quota, remaining, level * MINUTE_S / quota.capacity if quota.capacity else 0.0)
        case "concurrent":
            return Left(quota, remaining, 0.0)
        case _:
            return Left(quota, remaining, quota.reset_s(wall_s))


@dataclass(frozen=True, slots=True)
class LimitTable:
    """Which limits hold for whom. An owner without a limit of its own has ``default``, by key."""

    default: Limit = field(default_factory=Limit)
    keys: Mapping[str, Limit] = field(default_factory=dict)
    tenants: Mapping[str, Limit] = field(default_factory=dict)
    models: Mapping[str, Limit] = field(default_factory=dict)  # of each tenant at this model

    def quotas(self, key: str, tenant: str, model: str) -> list[Quota]:
        """Return all quotas that a request of ``key`` for ``model`` counts against."""
        found = self.keys.get(key, self.default).quotas(f"key/{key}")
        if tenant in self.tenants:
            found += self.tenants[tenant].quotas(f"tenant/{tenant}")
        if model in self.models:
            found += self.models[model].quotas(f"tenant/{tenant}/{model}")
        return found


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
        changes = []
        for charge in reservation.charges:
            actual = 0 if used is None else used.of(charge.quota.unit)
            if actual != charge.amount or charge.quota.period == "concurrent":
                changes.append(Charge(charge.quota, charge.key, actual - charge.amount))
        if changes:
            await self._store.change(reservation.request_id, changes)

    @property
    def is_degraded(self) -> bool:
        return self._store.is_degraded

    async def left(self, owners: Iterable[tuple[str, str]], models: Sequence[str]) -> list[Left]:
        """Return what (key, tenant) each have left of their quotas, with those of each tenant at ``models``."""
        wall, found = self._wall(), {}
        for key, tenant in owners:
            for model in models or [""]:
                found.update({quota.name: quota for quota in self._table.quotas(key, tenant, model)})
        charges = [Charge(q, q.key(wall), 0) for q in found.values() if q.period != "concurrent"]
        decision = await self._store.take("", charges) if charges else Decision(())
        open_keys = [charge.key for each in self._open.values() for charge in each.charges]
        places = [
            Left(q, max(0, q.capacity - open_keys.count(q.key(wall))), 0.0)
            for q in found.values()
            if q.period == "concurrent"
        ]
        return sorted([*decision.left, *places], key=lambda each: each.quota.name)

    async def budget_left(self, key: str, tenant: str) -> float:
        """Return the smallest share (0…1) that a key and its tenant have left of their budgets; 1 without any."""
        left = await self.left([(key, tenant)], [])
        budgets = [each for each in left if each.quota.period in ("day", "month")]
        return min((each.remaining / max(each.quota.capacity, 1) for each in budgets), default=1.0)

    async def renew(self) -> None:
        """Renew the leases of the open requests: to be called at least every `LEASE_S` / 3."""
        leases = [
            (request_id, charge.key)
            for request_id, reservation in self._open.items()
            for charge in reservation.charges
            if charge.quota.period == "concurrent"
        ]
        if leases:
            await self._store.renew([each[0] for each in leases], [each[1] for each in leases])


def limit_headers(left: Iterable[Left]) -> list[tuple[bytes, bytes]]:
    """Return OpenAI's ``x-ratelimit-*`` headers for the tightest quota per minute of each unit."""
    tightest: dict[str, Left] = {}
    for each in left:
        if each.quota.period != "minute":
            continue
        name = {Unit.INPUT: "input-tokens", Unit.OUTPUT: "output-tokens"}.get(
            each.quota.unit, str(each.quota.unit)
        )
        if name not in tightest or each.remaining < tightest[name].remaining:
            tightest[name] = each
    headers = []
    for name, each in tightest.items():
        headers += [
            (f"x-ratelimit-limit-{name}".encode(), str(each.quota.capacity).encode()),
            (f"x-ratelimit-remaining-{name}".encode(), str(each.remaining).encode()),
            (f"x-ratelimit-reset-{name}".encode(), f"{each.reset_s:.3f}s".encode()),
        ]
    return headers
