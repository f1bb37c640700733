"""Faults of tiers under a real engine: ``python -m tests.faults.kv_tier [--tier disk|peers|real]``.

The core, the scheduler and the executor run in this process on a virtual clock, with real segment files under a
`FaultyStore`, or real peers over TCP under `FaultyPeers`. Each run serves random traffic over a pool that is too small
for it, from what the runs before it have left. Wrong is: a token, a logit or an end that differs from what the sequence
gives alone without any cache; a run that does not end; a block, a request, an open file or a thread that is left.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from tests.exact.engine_run import Policy
from tests.exact.suite import Case, serve_and_check
from tests.exact.traffic import STEP_S
from tests.fakes.tiers import SteppedMover
from tests.faults import kv_processes
from tests.faults.kv_worlds import DiskWorld, PeerWorld, World
from tests.faults.report import table, write_section

from quire.executor.base import Executor
from quire.executor.moving import Ended
from quire.kernels.registry import backends
from quire.models.hub import quill_path

LIMIT_S = 600  # of a run


class LateMover(SteppedMover):
    """A mover in whose store an operation takes virtual time: its end is told that much later."""

    def __init__(self, executor: Executor, store: Any, delay: int, seed: int, waits: list[float]) -> None:
        super().__init__(executor, store, delay, seed)
        self._waits = waits
        self._late: dict[int, tuple[Ended, int]] = {}

    def take_ended(self) -> list[Ended]:
        told = [ended for ended, looks in self._late.values() if not looks]
        self._late = {key: (ended, looks - 1) for key, (ended, looks) in self._late.items() if looks}
        for ended in super().take_ended():
            looks = round(sum(self._waits) / STEP_S)
            self._waits.clear()
            if looks:
                self._late[ended.done.transfer_id] = ended, looks
            else:
                told.append(ended)
        return told

    def cancel(self, transfer_id: int) -> None:
        if self._late.pop(transfer_id, None) is None:
            super().cancel(transfer_id)

    def close(self) -> None:
        """The store outlives the engine."""


@dataclass(slots=True)
class Result:
    """What the runs of a campaign came to."""

    seen: Counter[str] = field(default_factory=Counter)
    num_runs: int = 0
    num_sequences: int = 0
    num_loaded: int = 0
    num_stored: int = 0
    wrong: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        return [*self.wrong, *self.stuck, *self.leaked]


def cases(quill: bool) -> list[Case]:
    """Return the models: layouts of KV that differ, and Quill."""
    level = backends("attention")[-1]
    tiny = [
        Case("llama", "float32", 91, 32),
        Case("sliding", "float32", 92, 32),
        Case("latent", "bfloat16", 93, 32, level),
        Case("llama", "bfloat16", 94, 32, level, kv_dtype="int8"),
        Case("hybrid", "float32", 96, 32),
    ]
    return [*tiny, Case(str(quill_path("quill")), "bfloat16", 95, 24, level)] if quill else tiny


def serve(world: World, index: int, case: Case, seed: int, result: Result) -> None:
    """Serve the traffic of ``case`` once on top of what ``world`` has of it, with faults on ``seed``."""
    dice, waits = random.Random(seed), list[float]()
    store = world.open(index, seed, waits.append)
    name = f"seed {seed}, {case}"
    try:
        run = serve_and_check(
            case,
            Policy("continuous", "fcfs", dice.choice((48, 256))),
            fail_every=dice.choice((None, None, 7)),
            mover_of=lambda executor: LateMover(executor, store, dice.randrange(2), seed, waits),
        )
    except TimeoutError:
        result.stuck.append(name)
    except AssertionError as error:
        kind = result.leaked if "leaked" in str(error) else result.wrong
        kind.append(f"{name}: {str(error)[:500]}")
    else:
        result.num_sequences += len(run.ended)
        result.num_loaded += run.tally.num_loaded
        result.num_stored += run.tally.num_stored
    result.num_runs += 1
    result.seen += store.seen
    store.close()


def campaign(
    world: World, num_faults: int, seed: int, *, quill: bool, limit_s: float, shows: bool = False
) -> Result:
    """Run until ``num_faults`` were injected, or for ``limit_s``; ``world`` is closed then."""
    logging.getLogger("quire").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _too_long)
    result, start_s, dice = Result(), time.monotonic(), random.Random(seed)
    models = cases(quill)
    held = Held()
    with closing(world):
        for index in range(len(models)):
            world.open(index, seed, lambda seconds: None).close()
        while result.seen.total() < num_faults and time.monotonic() - start_s < limit_s:
            # Quill's steps take longer than all the others' together.
            weights = [6] * (len(models) - quill) + [1] * quill
            index = dice.choices(range(len(models)), weights)[0]
            signal.alarm(LIMIT_S)
            serve(world, index, models[index], dice.randrange(2**32), result)
            signal.alarm(0)
            if dice.random() < 0.05:
                world.forget(index)
            if result.num_runs == 2 * len(models):
                held = Held.now()
            elif held.files and (more := Held.now().above(held, 8, wait_s=10.0)):
                result.leaked.append(more)
                held = Held()
            if shows and result.num_runs % 10 == 0:
                print(result.num_runs, result.seen.total(), result.num_loaded, result.failures, flush=True)
    return result


@dataclass(frozen=True, slots=True)
class Held:
    """What this process holds of the system."""

    files: int = 0
    threads: int = 0

    @classmethod
    def now(cls) -> Held:
        return cls(len(os.listdir("/proc/self/fd")), threading.active_count())

    def above(self, before: Held, allowed: int, wait_s: float) -> str:
        """Say what there is more of than ``before``, once what was closed has had time to end."""
        until_s, held = time.monotonic() + wait_s, self
        while held.files > before.files + allowed or held.threads > before.threads + allowed:
            if time.monotonic() > until_s:
                return f"{held}, and at first {before}"
            time.sleep(0.05)
            held = Held.now()
        return ""


def _too_long(*_: object) -> None:
    raise TimeoutError


def report(world: World, result: Result, seed: int, took_s: float) -> str:
    """Return the section of the results."""
    total = result.seen.total()
    rows = [(kind, f"{result.seen[kind]:,}") for kind in sorted(world.kinds)]
    return "\n\n".join(
        (
            f"{total:,} faults in {result.num_runs:,} runs of the engine with {result.num_sequences:,} sequences; "
            f"{result.num_stored:,} blocks stored and {result.num_loaded:,} loaded; {took_s / 60:.0f} minutes of "
            f"processor time on a shared machine, seed {seed}. Wrong answers {len(result.wrong)}, stuck "
            f"{len(result.stuck)}, leaked {len(result.leaked)}. {world.where} says what each kind does.",
            table(("fault", "times"), rows),
            *result.failures,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tier", choices=("disk", "peers", "real", "all"), default="all")
    parser.add_argument("--faults", type=int, default=10_000, help="of each tier, in process")
    parser.add_argument("--real", type=int, default=200, help="of real servers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="for each tier, in process")
    parser.add_argument(
        "--report", action="store_true", help="write sections of benchmarks/results/faults.md"
    )
    args = parser.parse_args()
    sections: list[tuple[str, str, str, list[str]]] = []
    for tier in ("disk", "peers"):
        if args.tier in (tier, "all"):
            world: World = DiskWorld() if tier == "disk" else PeerWorld()
            start_s = time.process_time()
            result = campaign(
                world, args.faults, args.seed, quill=True, limit_s=60 * args.minutes, shows=True
            )
            text = report(world, result, args.seed, time.process_time() - start_s)
            sections.append((world.title, f"--tier {tier} --faults {args.faults}", text, result.failures))
    if args.tier in ("real", "all"):
        outcome = kv_processes.campaign(args.real, args.seed)
        text = kv_processes.report(outcome, args.seed)
        sections.append((kv_processes.TITLE, f"--tier real --real {args.real}", text, outcome.failures))
    for title, arguments, text, _ in sections:
        print(text)
        if args.report:
            write_section(title, f"make faults-kv ARGS='{arguments} --seed {args.seed}'", text)
    sys.exit(any(failures for *_, failures in sections))


if __name__ == "__main__":
    main()
