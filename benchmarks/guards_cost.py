"""What heartbeats and the flight recorder cost: CPU time per decode step, with and without, in interleaved rounds.

    python -m benchmarks.guards_cost MODEL [--seqs 32] [--rounds 20] [--steps 8]

One engine in this process; each round runs ``--steps`` steps bare and as many with ticks and recorder, in turns. CPU
time of the process (all threads) is compared by medians, and the time within the guards' own calls is counted directly:
a share of a percent is less than the noise of a step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quire.args import EngineArgs
from quire.clock import WallClock
from quire.device import detect_device
from quire.engine.assemble import configure
from quire.engine.build import make_executor
from quire.engine.core import EngineCore
from quire.engine.heartbeat import Heartbeat, Ticker
from quire.executor.base import Executor
from quire.executor.recorder import Recorder
from quire.request import Request, Sampling
from quire.scheduler.scheduler import Scheduler
from quire.step import StepPlan, StepResult

RING = 8  # steps; what one costs does not depend on how many are kept


class Switched:
    """`RecordingExecutor` with a switch, which counts the time of the recorder's calls."""

    def __init__(self, inner: Executor, clock: WallClock) -> None:
        self.max_in_flight, self.chains_steps = inner.max_in_flight, inner.chains_steps
        self._inner, self._clock = inner, clock
        self.recorder = Recorder(RING)
        self.is_on = False
        self.guard_s = 0.0

    def timed(self, call: Callable[..., None], *args: Any) -> None:
        before_s = time.thread_time()
        call(*args)
        self.guard_s += time.thread_time() - before_s

    def submit(self, plan: StepPlan) -> None:
        if self.is_on:
            self.timed(self.recorder.submitted, plan, self._clock.now())
        self._inner.submit(plan)

    def collect(self) -> StepResult:
        result = self._inner.collect()
        if self.is_on:
            self.timed(self.recorder.collected, result, self._clock.now())
        return result

    def close(self) -> None:
        self._inner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--seqs", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    need = 2 * args.rounds * args.steps + RING + 64
    config, _ = configure(
        EngineArgs(
            model=args.model, num_kv_blocks=args.seqs * (need // 16 + 2), max_model_len=need, threads=args.threads
        ),
        detect_device("cpu"),
    )  # fmt: skip
    clock = WallClock()
    executor = Switched(make_executor(config, "local", clock), clock)
    scheduler = Scheduler(config.scheduler, config.cache)
    core = EngineCore(scheduler, executor, clock)
    with tempfile.TemporaryDirectory() as folder:
        ticker = Ticker(Heartbeat(Path(folder) / "heartbeat"), scheduler, clock)
        for i in range(args.seqs):
            sampling = Sampling(max_tokens=need - 32, temperature=1.0, seed=i)
            core.put(Request(f"r{i}", tuple(300 + 7 * i + j for j in range(16)), sampling, clock.now()))
        run(core, executor, ticker, RING + 4, on=True)  # from then on each step pushes one out
        bare, guarded, own = [], [], []
        for index in range(args.rounds):
            for on in (False, True) if index % 2 else (True, False):
                executor.guard_s = 0.0
                cpu_s = run(core, executor, ticker, args.steps, on=on) / args.steps
                (guarded if on else bare).append(cpu_s)
                if on:
                    own.append(executor.guard_s / args.steps)
    executor.close()
    show(args.seqs, bare, guarded, own)


def run(core: EngineCore, executor: Switched, ticker: Ticker, num_steps: int, *, on: bool) -> float:
    """Run steps; return the CPU seconds of the process."""
    executor.is_on = on
    core.on_tick = (lambda out: executor.timed(ticker, out)) if on else None
    before_s = time.process_time()
    for _ in range(num_steps):
        assert len(core.step()) > 0
    return time.process_time() - before_s


def show(num_seqs: int, bare: Sequence[float], guarded: Sequence[float], own: Sequence[float]) -> None:
    plain, with_guards, cost = statistics.median(bare), statistics.median(guarded), statistics.median(own)
    spread = statistics.quantiles(bare, n=4)
    print(f"{num_seqs} sequences, {len(bare)} rounds each; medians of CPU time per step\n")
    print("| | |\n|---|---|")
    print(f"| bare | {plain * 1e3:.2f} ms (quartiles {spread[0] * 1e3:.2f} to {spread[2] * 1e3:.2f}) |")
    print(f"| with heartbeat and recorder | {with_guards * 1e3:.2f} ms ({with_guards / plain - 1:+.2%}) |")
    print(f"| within the guards' own calls | {cost * 1e6:.0f} µs ({cost / plain:.3%}) |")


if __name__ == "__main__":
    main()
