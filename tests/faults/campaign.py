"""The table of faults, and one round: streams, a fault among them, and what came of both."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.live import ROOT
from tests.faults import attacks, injections
from tests.faults.injections import Inject
from tests.faults.probe import quantile_ms
from tests.faults.streams import Ask, Outcome, Streams
from tests.faults.world import ENGINES, World


@dataclass(frozen=True, slots=True)
class Fault:
    """A row of the table."""

    title: str
    inject: Inject
    times: int
    per_server: int = 1000  # a server sees this many at most
    settings: dict[str, Any] = field(default_factory=dict)  # of `World`
    engines: tuple[str, ...] = ("bfloat16",)  # servers of these in turn
    needs_mount: bool = False


FAULTS: dict[str, Fault] = {
    # The pause before a restart doubles with each within ten minutes: five per server keep it below 2 s.
    "kill": Fault("kill -9 of the engine", injections.kill_engine, 54, 5, engines=tuple(ENGINES)),
    "kill-twice": Fault("kill -9 of the engine, twice in the same streams", injections.kill_engine_twice, 6, 2),
    "stop": Fault("SIGSTOP of the engine until /readyz tells", injections.stop_engine, 20),
    "hang": Fault("SIGSTOP of the engine for good: replaced", injections.stop_engine_for_good, 6, 3),
    "stop-api": Fault("SIGSTOP of the API process, 2 s", injections.stop_api, 10),
    "laptop": Fault("SIGSTOP of both beyond the hang timeout", injections.sleep_laptop, 5),
    "stop-helper": Fault("SIGSTOP of the helpers, 1 s", injections.stop_helper, 10),
    "kill-helper": Fault("kill -9 of the helpers", injections.kill_helper, 20),
    "kill-front": Fault("kill -9 of the process in front", injections.kill_front, 4, 1),
    "disk": Fault("full disk under --batch-dir", injections.fill_batches, 10,
                  settings={"place": "batches"}, needs_mount=True),
    "shm": Fault("full /dev/shm while the engine is killed", injections.fill_place, 4, 4,
                 settings={"place": "shm"}, needs_mount=True),
    "tmp": Fault("full folder of temporary files while the engine is killed", injections.fill_place, 4, 4,
                 settings={"place": "tmp"}, needs_mount=True),
    "files": Fault("no free file descriptor (EMFILE), 1 s", attacks.no_free_files, 10),
    "readers": Fault("16 clients that read nothing or next to nothing", attacks.slow_readers, 10),
    "halves": Fault("16 half-closed sockets", attacks.half_close, 10),
    "vanish": Fault("32 clients that reset their connections", attacks.vanish, 20),
    "clock": Fault("jump of the wall clock by up to a month and back", injections.jump_clock, 20),
    "bodies": Fault("hostile body of up to 32 MB", attacks.hostile_body, 20),
    "schemas": Fault("hostile grammar", attacks.hostile_schema, 20),
    "templates": Fault("hostile chat template", attacks.hostile_template, 7,
                       settings={"template": attacks.HOSTILE_TEMPLATE}),
    "adapters": Fault("ten damaged adapters loaded at run time", attacks.damaged_adapter, 10),
    "nan": Fault("adapter of NaN, four requests", attacks.nan_weights, 10),
}  # fmt: skip


@dataclass(slots=True)
class Row:
    """What was seen of a fault."""

    title: str
    num_times: int = 0
    num_in_flight: int = 0
    num_equal: int = 0
    num_streams: int = 0
    num_missing: int = 0
    num_blocks: int = 0
    serve_s: list[float] = field(default_factory=list)
    probe_ms: list[float] = field(default_factory=list)
    num_probes_failed: int = 0
    notes: dict[str, list[float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def take(self, outcomes: list[Outcome], undisturbed: list[Outcome]) -> None:
        """Compare streams with those of an undisturbed run."""
        for got, alone in zip(outcomes, undisturbed, strict=True):
            self.num_streams += 1
            self.num_missing += got.num_missing
            if got.content == alone.content and got.content is not None and got.error is None:
                self.num_equal += 1
            else:
                self.wrong.append(f"{got.kind}: {got.status} {got.error or 'other content'}")


@contextlib.asynccontextmanager
async def probed(url: str, row: Row) -> AsyncIterator[None]:
    """Probe /livez from a process of its own while the block runs, as one on another machine would."""
    probe = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.probe", url],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # its turns on the CPU are not those of the clients of the streams
    )
    await asyncio.sleep(0.3)
    try:
        yield
    finally:
        said, _ = await asyncio.to_thread(probe.communicate, b"\n")
        found = json.loads(said)
        row.probe_ms += found["latencies_ms"]
        row.num_probes_failed += found["failed"] + sum(
            n for code, n in found["statuses"].items() if code != "200"
        )


async def undisturbed(world: World, asks: list[Ask]) -> tuple[list[Outcome], int]:
    """Return the streams of a run without a fault, and how many pieces they came in."""
    async with Streams(world.url, asks) as streams:
        outcomes = await streams.outcomes()
    wrong = [each for each in outcomes if each.error or each.num_missing or each.content is None]
    assert not wrong, wrong
    return outcomes, streams.num_pieces


async def one_round(
    world: World, fault: Fault, asks: list[Ask], alone: tuple[list[Outcome], int], row: Row
) -> None:
    """Inject a fault once, at a random moment of the streams, and compare their ends."""
    outcomes, num_pieces = alone
    async with Streams(world.url, asks) as streams:
        row.num_in_flight += await streams.reached(int(world.rng.uniform(0.02, 0.45) * num_pieces))
        healed_s = await fault.inject(world)
        row.serve_s.append(await world.served_again(healed_s))
        row.num_times += 1
        row.take(await streams.outcomes(), outcomes)


def figures(row: Row) -> tuple[str, ...]:
    """Return the cells of a row."""
    serve = sorted(row.serve_s) or [0.0]
    probe = (
        f"{quantile_ms(row.probe_ms, 0.5):.1f} / {quantile_ms(row.probe_ms, 0.99):.1f}"
        if row.probe_ms
        else "-"
    )
    return (
        row.title, str(row.num_times), str(row.num_in_flight), f"{row.num_equal} of {row.num_streams}",
        str(row.num_missing), str(row.num_blocks), f"{serve[len(serve) // 2]:.2f} / {serve[-1]:.2f}", probe,
        str(row.num_probes_failed),
    )  # fmt: skip
