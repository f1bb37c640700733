"""What `quire ledger` says of a ledger: sums by group, and which rows it forgets."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from quire.errors import ConfigError
from quire_gateway.ledger_database import Database
from quire_gateway.ledger_row import UNSETTLED

_UNSETTLED = f"COUNT(CASE WHEN outcome = '{UNSETTLED}' THEN 1 END)"
GROUPS = ("tenant", "key", "model", "backend", "endpoint", "outcome", "day", "month")
SUMS = ("prompt_tokens", "cached_tokens", "output_tokens", "price_nano", "estimated", "met_slo")
SECONDS = ("engine_s", "kv_block_s")


def report(
    database: Database, by: Sequence[str], since: datetime | None = None, until: datetime | None = None
) -> list[dict[str, Any]]:
    """Return a line per group with the number of requests, the sums of tokens and the price, sorted by group.

    ``estimated`` and ``unsettled``: requests among them whose tokens are estimates, and that are counted by what a
    killed gateway knew of them. ``goodput``: those that met every latency of ``[slo]``, per second from the first
    arrival to the last end in the whole report.

    Raises:
        ConfigError: a name of ``by`` that is no group.
    """
    if unknown := [group for group in by if group not in GROUPS]:
        raise ConfigError(f"--by {unknown[0]!r} must be of {', '.join(GROUPS)}.", param="by")
    where = "finished_at >= ? AND finished_at < ?"
    bounds = (since.timestamp() if since else 0.0, until.timestamp() if until else 1e18)
    plain = [group for group in by if group not in ("day", "month")]
    # Days are groups of 86,400 s of Unix time, which both databases compute alike; months are added up here.
    days = ["CAST(floor(finished_at / 86400) AS BIGINT)"] if len(plain) < len(by) else []
    groups = ", ".join([*plain, *days])
    sums = ", ".join(f"CAST(SUM({column}) AS BIGINT)" for column in SUMS)
    sums += ", " + ", ".join(f"SUM({column})" for column in SECONDS)
    span = f"SELECT MAX(finished_at) - MIN(finished_at - e2el_ms / 1000) FROM quire_ledger WHERE {where}"
    span_s = float(database.query(span, bounds)[0][0] or 0.0)
    rows = database.query(
        f"SELECT {groups + ', ' if groups else ''}COUNT(*), {_UNSETTLED}, {sums} FROM quire_ledger WHERE {where}"
        + (f" GROUP BY {groups}" if groups else ""),
        bounds,
    )
    totals: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        values = dict(zip(plain, row, strict=False))
        if days:
            date = datetime.fromtimestamp(row[len(plain)] * 86400, UTC)
            values |= {"day": f"{date:%Y-%m-%d}", "month": f"{date:%Y-%m}"}
        numbers = [number or 0 for number in row[len(plain) + len(days) :]]
        total = totals.setdefault(tuple(values[group] for group in by), [0] * len(numbers))
        total[:] = [a + b for a, b in zip(total, numbers, strict=True)]
    return [
        dict(zip(by, group, strict=True)) | _line(total, span_s) for group, total in sorted(totals.items())
    ]


def _line(total: Sequence[float], span_s: float) -> dict[str, Any]:
    line: dict[str, Any] = dict(zip(("requests", "unsettled", *SUMS, *SECONDS), total, strict=True))
    line |= {name: round(line[name], 6) for name in SECONDS}
    line["goodput"] = round(line["met_slo"] / span_s, 6) if span_s > 0 else 0.0
    return line


def forget(database: Database, before: datetime) -> int:
    """Delete the rows of requests that finished before ``before``; return how many there were."""
    bound = (before.timestamp(),)
    count = database.query("SELECT COUNT(*) FROM quire_ledger WHERE finished_at < ?", bound)[0][0]
    database.query("DELETE FROM quire_ledger WHERE finished_at < ?", bound)
    return int(count)
