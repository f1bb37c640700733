"""Faults under load: ``python -m benchmarks.faults [--only NAME …] [--times N] [--streams 32] [--seed 1]``.

Starts ``quire serve quill`` and, while 32 streams of every kind run, injects each fault of `tests.faults.campaign` at
random moments. Prints one row per fault: how often, the streams in flight, those that equal an undisturbed run of the
same server settings (ids, text, log-probabilities, usage), terminal events missing, blocks held at the end, the seconds
until a short completion is served again (median / slowest), and the latency of /livez beside it (p50 / p99) with the
number of probes that failed or were not 200. Exit status 1 where a stream differs or something is missing or left.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import time
import traceback
from pathlib import Path

from tests.faults.campaign import FAULTS, Fault, Row, figures, one_round, probed, undisturbed
from tests.faults.report import table, write_section
from tests.faults.streams import Outcome, mixed
from tests.faults.world import World, may_mount

HEAD = (
    "fault", "times", "streams in flight", "equal", "terminal events missing", "blocks held",
    "serves again, s (median / max)", "/livez, ms (p50 / p99)", "probes not 200",
)  # fmt: skip


class Run:
    """The whole of it: rows, and the undisturbed streams of each setting of the engine."""

    def __init__(self, seed: int, num_streams: int, until_s: float) -> None:
        self._seed, self._asks, self._until_s = seed, mixed(num_streams), until_s
        self._alone: dict[str, tuple[list[Outcome], int]] = {}
        self.rows: list[Row] = []

    async def calm(self) -> None:
        """The row without a fault, which also is the measure of the others."""
        row = Row("none")
        self.rows.append(row)
        with World(self._seed) as world:
            alone = await self._measure(world)
            async with probed(world.url, row):
                for _ in range(3):
                    again, _ = await undisturbed(world, self._asks)
                    row.take(again, alone[0])
                    row.serve_s.append(await world.served_again(time.monotonic()))
            row.num_blocks = await world.num_blocks_held()

    async def _measure(self, world: World) -> tuple[list[Outcome], int]:
        if world.engine not in self._alone:
            self._alone[world.engine] = await undisturbed(world, self._asks)
        return self._alone[world.engine]

    async def inject(self, fault: Fault, times: int) -> None:
        """Inject a fault so many times, on as many servers as it takes."""
        row = Row(fault.title)
        self.rows.append(row)
        num_servers = 0
        while row.num_times < times and time.monotonic() < self._until_s and not row.wrong:
            engine = fault.engines[num_servers % len(fault.engines)]
            num_servers += 1
            try:
                with World(self._seed + num_servers, engine, **fault.settings) as world:
                    await self._on(world, fault, min(fault.per_server, times - row.num_times), row)
            except Exception as error:
                row.wrong.append("".join(traceback.format_exception_only(error)).strip()[-600:])
                traceback.print_exc()

    async def _on(self, world: World, fault: Fault, times: int, row: Row) -> None:
        alone = await self._measure(world)
        async with probed(world.url, row):
            for _ in range(times):
                if time.monotonic() > self._until_s:
                    break
                await one_round(world, fault, self._asks, alone, row)
        row.num_blocks += await world.num_blocks_held()
        for name, values in world.notes.items():
            row.notes.setdefault(name, []).extend(values)


def report(run: Run, seed: int, num_streams: int, seconds: float) -> str:
    """Return the table and the notes below it."""
    lines = [
        f"Seed {seed}, {num_streams} streams, {seconds:.0f} s.\n",
        table(HEAD, [figures(row) for row in run.rows]),
    ]
    for row in run.rows:
        for name, values in row.notes.items():
            lines.append(
                f"\n{row.title}: {name}: {min(values):.3f} to {max(values):.3f} ({len(values)} times)."
            )
        lines += [f"\n{row.title}: WRONG: {wrong}" for wrong in row.wrong[:5]]
    return "\n".join(lines)


async def everything(args: argparse.Namespace) -> Run:
    run = Run(args.seed, args.streams, time.monotonic() + 60 * args.minutes)
    await run.calm()
    print(table(HEAD, [figures(run.rows[0])]), flush=True)
    mounts = may_mount()
    for name in args.only or FAULTS:
        fault = FAULTS[name]
        if (fault.needs_mount and not mounts) or (name == "clock" and shutil.which("cc") is None):
            print(f"{fault.title}: not run, this machine allows no mounts or has no C compiler")
            continue
        await run.inject(fault, args.times or fault.times)
        print("| " + " | ".join(figures(run.rows[-1])) + " |", *run.rows[-1].wrong[:3], flush=True)
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="*", choices=FAULTS)
    parser.add_argument("--times", type=int, help="of each fault, in place of the table's")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after so long, whatever is left")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, nargs="?", const=Path("benchmarks/results/faults.md"))
    args = parser.parse_args()
    begin_s = time.monotonic()
    run = asyncio.run(everything(args))
    text = report(run, args.seed, args.streams, time.monotonic() - begin_s)
    print("\n" + text)
    if args.report:
        write_section("Faults under 32 streams", "make faults", text, args.report)
    bad = [row.title for row in run.rows if row.wrong or row.num_missing or row.num_blocks]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
