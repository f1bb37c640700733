"""Seconds of scheduler + cache per step, plan and apply together, with many sequences decoding.

The bound: median ≤ 1.0 ms at 256 running sequences, aim 0.5 ms. The executor is a stub whose cost is not
counted: it answers each plan with ready-made results.

    python benchmarks/scheduler_step.py [--seqs 256] [--steps 400] [--windows full,1024] [--in-flight 1]
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

from quire.clock import WallClock
from quire.config import CacheConfig, SchedulerConfig
from quire.engine.heartbeat import HangWatch, Heartbeat, Ticker
from quire.request import Request, SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.step import SeqResult, StepPlan, StepResult

T = TypeVar("T")


class Spent(NamedTuple):
    """Time of one call. CPU time leaves out what other processes of a busy machine took."""

    wall_ms: float
    cpu_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seqs", type=int, default=256, help="sequences that decode at once")
    parser.add_argument("--steps", type=int, default=400, help="steps measured")
    parser.add_argument("--prompt", type=int, default=100, help="prompt tokens of each")
    parser.add_argument(
        "--windows", default="full", help="cache groups: 'full' or a window in tokens, by commas"
    )
    parser.add_argument("--in-flight", type=int, default=1, help="steps planned ahead of the results")
    parser.add_argument(
        "--drafts", type=int, default=0, help="speculation that may have so many, and finds none"
    )
    args = parser.parse_args()
    windows = tuple(None if w == "full" else int(w) for w in args.windows.split(","))
    samples = measure(args.seqs, args.steps, args.prompt, windows, args.in_flight, args.drafts)
    wall_ms = sorted(plan.wall_ms + apply.wall_ms for plan, apply in samples)
    cpu_ms = sorted(plan.cpu_ms + apply.cpu_ms for plan, apply in samples)
    report = {
        "seqs": args.seqs,
        "steps": len(samples),
        "windows": args.windows,
        "in_flight": args.in_flight,
        "drafts": args.drafts,
        "wall_ms_median": round(median(wall_ms), 3),
        "wall_ms_p99": round(wall_ms[int(len(wall_ms) * 0.99)], 3),
        "cpu_ms_min": round(cpu_ms[0], 3),
        "cpu_ms_median": round(median(cpu_ms), 3),
        "cpu_ms_p99": round(cpu_ms[int(len(cpu_ms) * 0.99)], 3),
        "cpu_ms_plan": round(median(plan.cpu_ms for plan, _ in samples), 3),
        "cpu_ms_apply": round(median(apply.cpu_ms for _, apply in samples), 3),
        "cpu_us_tick": round(tick_us(args.seqs), 2),
        "cpu_us_look": round(look_us(), 2),
    }
    print(json.dumps(report))


def measure(
    num_seqs: int,
    num_steps: int,
    num_prompt: int,
    windows: tuple[int | None, ...],
    in_flight: int,
    num_drafts: int,
) -> list[tuple[Spent, Spent]]:
    """Return the times of plan and of apply of each of ``num_steps`` steps in which all sequences decode."""
    longest = num_prompt + num_steps + 64
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_seqs * (num_prompt + 16),
            max_model_len=longest + 1,
            max_queue=num_seqs,
            max_num_drafts=num_drafts,
            adaptive_drafts=True,
        ),
        CacheConfig(num_blocks=len(windows) * num_seqs * (longest // 16 + 2), windows=windows),
    )
    for i in range(num_seqs):
        # Lengths differ, so that the sequences do not all cross into a new block in the same step.
        prompt = tuple(range(i, i + num_prompt + i % 16))
        sampling = SamplingParams(seed=i, max_tokens=num_steps + 40, eos_token_ids=(1,))
        scheduler.add(Request(f"request-{i}", prompt, sampling, arrival_s=0.0), 0.0)
    out: deque[tuple[StepPlan, Spent]] = deque()
    samples: list[tuple[Spent, Spent]] = []
    gc.collect()
    gc.disable()
    try:
        while len(samples) < num_steps:
            plan_spent, plan = timed(partial(scheduler.plan, 1.0))
            if plan is not None:
                out.append((plan, plan_spent))
                if len(out) < in_flight:
                    continue
            oldest, plan_spent = out.popleft()
            apply_spent, _ = timed(partial(scheduler.apply, answer(oldest), 1.0))
            if len(oldest.seqs) == num_seqs and all(p.num_scheduled_tokens == 1 for p in oldest.seqs):
                samples.append((plan_spent, apply_spent))
    finally:
        gc.enable()
    return samples


def tick_us(num_seqs: int, rounds: int = 20, calls: int = 2000) -> float:
    """Return the CPU time of what a step adds for the heartbeat, with ``num_seqs`` sequences in the step in flight."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs * 16, max_queue=num_seqs),
        CacheConfig(num_blocks=4 * num_seqs),
    )
    for i in range(num_seqs):
        sampling = SamplingParams(seed=i, max_tokens=8, eos_token_ids=(1,))
        scheduler.add(Request(f"request-{i}", (i, i + 1), sampling, arrival_s=0.0), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.apply(answer(plan), 1.0)
    plan = scheduler.plan(1.0)
    assert plan is not None
    with tempfile.TemporaryDirectory() as folder:
        ticker = Ticker(Heartbeat(Path(folder, "page")), scheduler, WallClock())
        return per_call_us(lambda: ticker([plan]), rounds, calls)


def look_us(rounds: int = 20, calls: int = 2000) -> float:
    """Return the CPU time of a look at the heartbeat, in the API process, once per message from the engine."""
    with tempfile.TemporaryDirectory() as folder:
        watch = HangWatch(Heartbeat(Path(folder, "page")), 0.0)
        return per_call_us(lambda: watch.look(time.monotonic()), rounds, calls)


def per_call_us(call: Callable[[], object], rounds: int, calls: int) -> float:
    spent = [timed(lambda: [call() for _ in range(calls)])[0].cpu_ms * 1e3 / calls for _ in range(rounds)]
    return median(spent)


def timed(call: Callable[[], T]) -> tuple[Spent, T]:
    wall, cpu = time.perf_counter(), time.thread_time()
    value = call()
    return Spent(1e3 * (time.perf_counter() - wall), 1e3 * (time.thread_time() - cpu)), value


def answer(plan: StepPlan) -> StepResult:
    """Return a token for every row that ends its sequence (here: every decode, and the last prompt chunk)."""
    results = tuple(
        SeqResult(p.seq_id, p.epoch, (2 + (p.seq_id * 31 + p.num_computed_tokens) % 1000,)) for p in plan.seqs
    )
    return StepResult(plan.step, results)


if __name__ == "__main__":
    main()
