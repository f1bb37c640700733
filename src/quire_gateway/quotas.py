"""Quotas: what one limit of a key, tenant or model counts, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from enum import StrEnum

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
        quotas = []
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is not None:
                unit, period = _MEANING[entry.name]
                capacity = round(value * NANO) if unit is Unit.MONEY else value
                quotas.append(Quota(f"{owner}/{entry.name}", unit, period, capacity))
        return quotas


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

    @property
    def is_budget(self) -> bool:
        return self.period in ("day", "month")

    def key(self, wall_s: float) -> str:
        """Return the name of its books, which for a budget are those of the day or month of ``wall_s`` (Unix time)."""
        if not self.is_budget:
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
