"""``quire plan --compare PLAN.json``: another plan beside this one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from quire.errors import ConfigError
from quire.units import GIB

# Figure → where it is in a plan's JSON.
FIGURES = {
    "weights, GiB": "memory.weights",
    "left for K and V, GiB": "memory.kv_pool",
    "requests at once": "memory.max_requests",
    "TTFT, ms": "predicted.ttft_ms",
    "TPOT, ms": "predicted.tpot_ms",
    "E2EL, ms": "predicted.e2el_ms",
    "running": "predicted.running",
    "requests/s": "predicted.requests_per_s",
    "output tokens/s": "predicted.output_tokens_per_s",
    "goodput, requests/s": "predicted.goodput_per_s",
    "USD per hour": "cost.usd_per_hour",
    "USD per million tokens in": "cost.usd_per_million_input",
    "USD per million tokens out": "cost.usd_per_million_output",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of two plans; None: the plan has none. ``ratio``: this plan's over the other's."""

    name: str
    other: float | None
    this: float | None
    ratio: float | None


def read_plan(path: str) -> dict[str, Any]:
    """Read what ``quire plan --json`` printed.

    Raises:
        ConfigError: names the file and what is wrong with it.
    """
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--compare {path}: cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"--compare {path}: must be the output of `quire plan … --json`: {error}") from None
    if not isinstance(data, dict) or (lacks := [k for k in _KEYS if k not in data]):
        what = f"it lacks {', '.join(lacks)}" if isinstance(data, dict) else "it is no object"
        raise ConfigError(f"--compare {path}: must be the output of `quire plan … --json`; {what}")
    return data


_KEYS = ("model", "hardware", "memory", "predicted", "split", "command")


def compare(other: Mapping[str, Any], this: Mapping[str, Any]) -> list[Row]:
    """Return the figures of two plans, as `CapacityPlan.as_dict` gives them; figures that neither has are left out."""
    rows = []
    for name, path in FIGURES.items():
        scale = GIB if name.endswith("GiB") else 1
        one, two = (
            value / scale if value is not None else None for value in (_at(other, path), _at(this, path))
        )
        if one is not None or two is not None:
            rows.append(Row(name, one, two, two / one if one and two is not None else None))
    return rows


def _at(plan: Mapping[str, Any], path: str) -> float | None:
    group, _, key = path.partition(".")
    value = (plan[group] or {}).get(key)
    return float(value) if isinstance(value, int | float) else None


def comparison_table(other: Mapping[str, Any], this: Mapping[str, Any]) -> Table:
    """Return two plans side by side."""
    table = Table("", _title(other), _title(this), "ratio", box=None, pad_edge=False)
    for row in compare(other, this):
        one, two = (f"{v:,.4g}" if v is not None and v < 1000 else "—" if v is None else f"{v:,.0f}"
                    for v in (row.other, row.this))  # fmt: skip
        table.add_row(row.name, one, two, "" if row.ratio is None else f"{row.ratio:.2f} ×")
    return table


def _title(plan: Mapping[str, Any]) -> str:
    split = plan["split"] or {}
    cut = " ".join(f"{axis.upper()}{n}" for axis, n in split.items() if n > 1) or "one device"
    weights = plan.get("weights", "")
    return f"{plan['model']} {weights}, {plan['hardware']['count']} × {plan['hardware']['name']}: {cut}"
