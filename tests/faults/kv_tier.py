"""Faults of the tier on disk under a real engine: ``python -m tests.faults.kv_tier [--faults 10000] [--seed 1]``.

The core, the scheduler and the executor run in this process on a virtual clock, with real segment files under a
`FaultyStore`. Each run serves random traffic over a pool that is too small for it, from the folder that the runs before
it have left. Wrong is: a token, a logit or an end that differs from what the sequence gives alone without any cache; a
run that does not end; a block, a request or an open file that is left.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.exact.engine_run import Policy
from tests.exact.suite import Case, serve_and_check
from tests.exact.traffic import STEP_S
from tests.fakes.faulty_store import FAULTS, Fault, FaultyStore
from tests.fakes.tiers import SteppedMover
from tests.faults.report import table, write_section

from quire.executor.base import Executor
from quire.executor.moving import Ended
from quire.kernels.registry import backends
from quire.models.hub import quill_path

ROOT_NAME = "0" * 32
LIMIT_S = 600  # of a run
# What loses a whole folder, or silences a store for long, is rare: else there is little left to read.
RARE: tuple[Fault, ...] = ("removed", "killed", "dead")


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

    seen: Counter[Fault] = field(default_factory=Counter)
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
    ]
    return [*tiny, Case(str(quill_path("quill")), "bfloat16", 95, 24, level)] if quill else tiny


def serve(case: Case, folder: Path, seed: int, result: Result) -> None:
    """Serve the traffic of ``case`` once on top of what ``folder`` has, with faults on ``seed``."""
    dice, waits = random.Random(seed), list[float]()
    rates: dict[Fault, float] = {kind: 0.03 if kind in RARE else 0.09 for kind in FAULTS}
    store = FaultyStore(folder, 4 << 20, ROOT_NAME, rates=rates, seed=seed, wait=waits.append, hang_s=0.8)
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


def campaign(num_faults: int, seed: int, *, quill: bool, limit_s: float, shows: bool = False) -> Result:
    """Run until ``num_faults`` were injected, or for ``limit_s``."""
    logging.getLogger("quire").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _too_long)
    result, start_s, dice = Result(), time.monotonic(), random.Random(seed)
    models = cases(quill)
    with tempfile.TemporaryDirectory(prefix="quire-faults-kv-") as name:
        num_files = 0
        while result.seen.total() < num_faults and time.monotonic() - start_s < limit_s:
            # Quill's steps take longer than all the others' together.
            weights = [6] * (len(models) - quill) + [1] * quill
            index = dice.choices(range(len(models)), weights)[0]
            folder = Path(name) / str(index)
            signal.alarm(LIMIT_S)
            serve(models[index], folder, dice.randrange(2**32), result)
            signal.alarm(0)
            if dice.random() < 0.05:
                shutil.rmtree(folder)
            if result.num_runs == 2 * len(models):
                num_files = len(os.listdir("/proc/self/fd"))
            elif num_files and len(os.listdir("/proc/self/fd")) > num_files + 8:
                result.leaked.append(f"{len(os.listdir('/proc/self/fd'))} open files, {num_files} at first")
                num_files = 0
            if shows and result.num_runs % 10 == 0:
                print(result.num_runs, result.seen.total(), result.num_loaded, result.failures, flush=True)
    return result


def _too_long(*_: object) -> None:
    raise TimeoutError


def report(result: Result, seed: int, took_s: float) -> str:
    """Return the section of the results."""
    total = result.seen.total()
    rows = [(kind, f"{result.seen[kind]:,}") for kind in sorted(FAULTS)]
    return "\n\n".join(
        (
            f"{total:,} faults in {result.num_runs:,} runs of the engine with {result.num_sequences:,} sequences; "
            f"{result.num_stored:,} blocks stored and {result.num_loaded:,} loaded; {took_s / 60:.0f} minutes of "
            f"processor time on a shared machine, seed {seed}. Wrong answers {len(result.wrong)}, stuck "
            f"{len(result.stuck)}, leaked {len(result.leaked)}. tests/fakes/faulty_store.py says what each kind does.",
            table(("fault", "times"), rows),
            *result.failures,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--report", action="store_true", help="write the section of benchmarks/results/faults.md"
    )
    args = parser.parse_args()
    start_s = time.process_time()
    result = campaign(args.faults, args.seed, quill=True, limit_s=60 * args.minutes, shows=True)
    text = report(result, args.seed, time.process_time() - start_s)
    print(text)
    if args.report:
        write_section("The tier on disk", "make faults-kv", text)
    sys.exit(bool(result.failures))


if __name__ == "__main__":
    main()
