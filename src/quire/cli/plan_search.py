"""``quire plan --search``: candidate settings simulated, the cheapest that holds the SLO first."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from quire.errors import ConfigError
from quire.plan.capacity import Question
from quire.sim.search import SHARE, Found, Search
from quire.workload.arrivals import Arrivals
from quire.workload.build import Synthetic, at_rate, from_trace
from quire.workload.lengths import Fixed
from quire.workload.traces import read_trace

NUM_REQUESTS = 300


def search(question: Question, workload: str) -> Found:
    """Simulate settings of at most ``question.count`` devices under ``workload`` (a trace file, or fixed lengths).

    Raises:
        ConfigError: no rate or no SLO is given.
    """
    rate = question.load.rate
    if rate is None:
        raise ConfigError("--search needs --rate: requests a second that the service has to take")
    if Path(workload).is_file():
        trace = from_trace(
            read_trace(workload), limit=NUM_REQUESTS, max_model_len=question.spec.max_position_embeddings
        )
        return Search(question, at_rate(trace, rate)).find()
    load = question.load
    synthetic = Synthetic(NUM_REQUESTS, Fixed(load.isl), Fixed(load.osl), Arrivals(rate))
    return Search(question, synthetic.build(seed=0)).find()


def as_dict(found: Found) -> dict[str, Any]:
    """For ``--json``."""
    return {
        "best": asdict(found.best) if found.best else None,
        "tried": [asdict(tried) for tried in found.tried],
        "grid_size": found.grid_size,
        "share": SHARE,
    }


def table_of(found: Found) -> Table:
    """What was simulated, the cheapest first."""
    table = Table(
        "TP", "replicas", "chunk", "USD/h", "within SLO", "TTFT p95", "TPOT p95", box=None, pad_edge=False
    )
    for tried in sorted(found.tried, key=lambda t: (t.cost, -t.share)):
        s, style = tried.setting, "bold" if tried is found.best else ""
        usd = "unknown" if tried.usd_per_hour is None else f"{tried.usd_per_hour:.2f}"
        late = [f"{ms:.0f} ms" if ms is not None else "" for ms in (tried.ttft_p95_ms, tried.tpot_p95_ms)]
        cells = (str(s.tp), str(s.replicas), str(s.max_num_batched_tokens), usd, f"{tried.share:.1%}", *late)
        table.add_row(*cells, style=style)
    return table
