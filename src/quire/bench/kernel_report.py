"""What `quire bench kernel` prints: the rows of `quire.bench.kernel` for a person or as JSON."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.table import Table

from quire.bench import kernel as bench
from quire.bench.offline_args import KernelArgs
from quire.device import detect_device


def kernel(args: KernelArgs) -> None:
    """Time the kernels and print them.

    Raises:
        ConfigError: an op or a level that is not there, or no native kernels at all.
    """
    device = detect_device()
    level, num_threads = args.isa or device.isa, args.threads or device.num_cores
    bounds, rows = bench.run(args.op, level, num_threads, args.seconds)  # type: ignore[arg-type]
    if args.json:
        print(json.dumps({"isa": level, "threads": num_threads, **bench.as_dict(bounds, rows)}))
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(f"{level}, {num_threads} threads. Bounds now: {bounds}")
    table = Table("op", "case", "level", box=None, pad_edge=False)
    for heading in ("µs", "GB/s", "Gop/s", "bound µs", "of bound"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.op,
            row.case,
            row.isa,
            f"{row.microseconds:.1f}",
            f"{row.gb_s:.1f}",
            f"{row.gop_s:.0f}",
            "" if row.bound_us is None else f"{row.bound_us:.1f}",
            "" if row.share is None else f"{row.share:.0%}",
        )
    console.print(table)
