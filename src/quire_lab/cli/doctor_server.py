"""`quire doctor --server URL`: the ranks of a running server, from its metrics over a second."""

from __future__ import annotations

import asyncio
import re

from rich.console import Console
from rich.table import Table

from quire_lab.diagnose.read import Metrics, Reading, read

SECONDS = 1.0
_INFO = "quire:rank_info{"


def server(url: str, key: str | None) -> None:
    """Print a line per rank.

    Raises:
        ConfigError: no engine answers at ``url``.
    """
    reading = asyncio.run(read(url, SECONDS, key=key))
    console = Console()
    console.print(f"[bold]{reading.url}[/bold] {reading.card.get('id', '')}", highlight=False)
    ranks = ranks_of(reading.after)
    if not ranks:
        console.print("One process: the model is not cut over ranks.")
        return
    names = ("rank", "stage", "host", "process", "cores", "steps", "weights", "peak memory", "busy", "sent")
    table = Table(*names, box=None, pad_edge=False)
    for rank in ranks:
        table.add_row(*row_of(reading, rank))
    console.print(table)
    idle = reading.after.get("quire:ranks_idle_ratio", 0.0)
    console.print(
        f"\n• Since the start, ranks waited {idle:.1%} of the time in which a step was out.", highlight=False
    )


def ranks_of(metrics: Metrics) -> list[dict[str, str]]:
    """Return the labels of each rank, by its number."""
    ranks = [dict(re.findall(r"(\w+)=([^,}]*)", name)) for name in metrics if name.startswith(_INFO)]
    return sorted(ranks, key=lambda labels: int(labels["rank"]))


def row_of(reading: Reading, rank: dict[str, str]) -> list[str]:
    """Return the texts of a line of the table."""

    def now(name: str) -> float:
        return reading.after.get(f"{name}{{rank={rank['rank']}}}", 0.0)

    def rate(name: str) -> float:
        return (now(name) - reading.before.get(f"{name}{{rank={rank['rank']}}}", 0.0)) / reading.seconds

    return [
        *(rank[name] for name in ("rank", "stage", "host", "pid", "cores", "steps")),
        f"{now('quire:rank_weight_bytes') / 2**30:.2f} GiB",
        f"{now('quire:rank_peak_memory_bytes') / 2**30:.2f} GiB",
        f"{rate('quire:rank_busy_seconds_total'):.0%}",
        f"{rate('quire:rank_bytes_sent_total') / 1e6:.1f} MB/s",
    ]
