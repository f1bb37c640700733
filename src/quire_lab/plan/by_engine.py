"""`by_engine`: a plan's figures with each measured engine's constants, for a plan that names none."""

from __future__ import annotations

import math
from dataclasses import replace

from quire.cost.efficiency import MEASURED
from quire_lab.plan.capacity import CapacityPlan

Figures = dict[str, float | None]


def by_engine(plan: CapacityPlan) -> dict[str, Figures]:
    """Return engine → TTFT, TPOT, E2EL and requests/s of the chosen split; empty where the plan names an engine.

    Engines at equal settings differ by a factor of two in TTFT, so without an engine the range is the answer.
    """
    q, chosen = plan.question, plan.advice.chosen
    if q.engine != "default" or chosen is None or chosen.estimate is None:
        return {}
    by_name = {}
    for engine in MEASURED:
        estimate = replace(q, engine=engine, split=chosen.split).look(chosen.split).estimate
        assert estimate is not None
        figures = {
            "ttft_ms": estimate.ttft_s * 1e3,
            "tpot_ms": estimate.tpot_s * 1e3,
            "e2el_ms": estimate.e2el_s * 1e3,
            "requests_per_s": estimate.rate * chosen.split.dp,
        }
        by_name[engine] = {name: x if math.isfinite(x) else None for name, x in figures.items()}
    return by_name


def spread(figures: dict[str, Figures], name: str, own: float | None) -> tuple[float, float] | None:
    """Return the least and the most of a figure over the engines and the plan itself; None: one is without bound."""
    values = [row[name] for row in figures.values()]
    known = [value for value in (*values, own) if value is not None]
    return (min(known), max(known)) if len(known) > len(values) and values else None
