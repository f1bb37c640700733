"""What every adapter does: start its engine, warm it up, run workloads, print one JSON line for each.

    CELL {"workload": "A", "prefill_s": [...], "total_s": [...]}      (two requests of each kind)
    CELL {"workload": "B", "total_s": [...], "output_tokens": 4096}

An adapter gives `main` a function that loads a model and returns an `Engine`. TTFT is taken alike for all: the time of
a request for one token; decode is (time of 128 tokens − time of one) / 127, prompts of the same length.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from workloads import Item, long_warm_up, make, warm_up


class Engine(Protocol):
    """What an adapter provides. Both return the number of output tokens of each request."""

    def generate(self, items: Sequence[Item]) -> list[int]:
        """Run all requests, submitted at once."""
        ...

    def replay(self, items: Sequence[Item]) -> list[int]:
        """Run all requests, each submitted at its ``arrival_s``. May raise NotImplementedError."""
        ...


def timed(run: Callable[[Sequence[Item]], list[int]], items: Sequence[Item]) -> float:
    """Return the seconds of ``run(items)``; every request must give all its tokens."""
    begin = time.perf_counter()
    counts = run(items)
    seconds = time.perf_counter() - begin
    assert counts == [item.output for item in items], f"output tokens {counts}"
    return seconds


def run_workload(engine: Engine, name: str, round_: int, rate: float) -> dict[str, Any]:
    if name == "A":
        times: dict[str, list[float]] = {"prefill_s": [], "total_s": []}
        for part in range(2):
            prompt = make("A", 1000 * round_ + 2 * part)[0].prompt
            times["prefill_s"].append(timed(engine.generate, [Item(prompt, 1)]))
            times["total_s"].append(timed(engine.generate, make("A", 1000 * round_ + 2 * part + 1)))
        return {"workload": name, **times}
    items = make(name, round_, rate)
    seconds = timed(engine.replay if name == "D" else engine.generate, items)
    output_tokens = sum(item.output for item in items)
    return {"workload": name, "total_s": [seconds], "output_tokens": output_tokens, "rate": rate}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--workloads", required=True)
    parser.add_argument("--round", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second (D)")
    parser.add_argument("--options", type=json.loads, default={}, help="the adapter's own, as JSON")
    return parser.parse_args()


def main(load: Callable[[Path, dict[str, Any]], Engine]) -> None:
    """Run the workloads named on the command line with the engine that ``load(model, options)`` returns."""
    given = arguments()
    begin = time.perf_counter()
    engine = load(given.model, given.options)
    load_s = time.perf_counter() - begin
    for items in (warm_up(), long_warm_up()):
        engine.generate(items)
    for name in given.workloads:
        cell = run_workload(engine, name, given.round, given.rate) | {"load_s": load_s}
        print("CELL " + json.dumps(cell | getattr(engine, "facts", {})), flush=True)


def replay_steps(
    items: Sequence[Item],
    submit: Callable[[int, Item], None],
    step: Callable[[], None],
    busy: Callable[[], bool],
) -> None:
    """Submit each item when its time comes; step the engine while it has work."""
    begin = time.perf_counter()
    waiting = sorted(enumerate(items), key=lambda pair: pair[1].arrival_s)
    while waiting or busy():
        now = time.perf_counter() - begin
        while waiting and waiting[0][1].arrival_s <= now:
            submit(*waiting.pop(0))
        if busy():
            step()
        else:
            time.sleep(max(0.0, waiting[0][1].arrival_s - now))
