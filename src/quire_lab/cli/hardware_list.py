"""``quire plan MODEL --gpu list``: the hardware table with what devices cost to buy, to rent and to run."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from quire.cost.hardware import hardware_table
from quire.units import GIB


def show_hardware(*, as_json: bool) -> int:
    """Print every device; return 0."""
    table = hardware_table()
    if as_json:
        print(json.dumps({name: asdict(hw) for name, hw in table.items()}, indent=1))
        return 0
    shown = Table("device", "GiB", "GB/s", "bf16 Top/s", "W", "buy, USD", "rent, USD/h", "spot, USD/h", "rent from",
                  box=None, pad_edge=False)  # fmt: skip
    for name, hw in table.items():
        price = hw.price
        figures = (hw.watts, hw.purchase_usd, price.usd if price else None, hw.spot_usd)
        cells = ("" if x is None else f"{x:,.0f}" if x >= 10 else f"{x:.2f}" for x in figures)
        where = f"{price.source}, {price.date}" if price else ""
        flops = hw.flops.get("bf16", 0) / 1e12
        shown.add_row(
            name,
            f"{hw.memory_bytes / GIB:,.0f}",
            f"{hw.bandwidth / 1e9:,.0f}",
            f"{flops:,.1f}" if flops else "",
            *cells,
            where,
        )
    console = Console() if Console().is_terminal else Console(width=150)
    console.print(shown)
    console.print(
        "\nPrices are examples with the date of their source (purchases: 2026-11-23); spot: RunPod, 2026-03. "
        "Give your own with --price, --purchase, --watts and --power-price.",
        highlight=False,
    )
    return 0
