"""Where a decode step's time goes: the recorded kernels by op, sampling, and the rest of the engine.

    python benchmarks/step_split.py /tmp/models/smol-135m [--batch 1] [--steps 200] [--temperature 0]

Medians over the steps in which every sequence decodes. "small ops" are all kernels but linears and attention; "engine"
is everything that is neither kernels nor sampling: plan, inputs, results, events. The aim is engine + small ops +
sampling of at most 1.0 ms at batch 1 of SmolLM2-135M. Ops are timed in replays of their own, halfway through, since
asking for the time of each call costs some.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from quire.args import EngineArgs
from quire.clock import WallClock
from quire.config import EngineConfig
from quire.device import detect_device
from quire.engine.assemble import configure
from quire.engine.core import EngineCore
from quire.executor.local import LocalExecutor
from quire.request import Request, SamplingParams
from quire.scheduler.scheduler import Scheduler


class Stopwatch:
    """Adds up the time inside a wrapped function."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent_s += time.perf_counter() - start

        return timed

    def take(self) -> float:
        spent_s, self.spent_s = self.spent_s, 0.0
        return spent_s


def requests(config: EngineConfig, given: argparse.Namespace) -> list[Request]:
    rng = random.Random(1)
    sampling = SamplingParams(
        temperature=given.temperature, top_p=given.top_p, max_tokens=given.steps + 8, ignore_eos=True, seed=1
    )
    vocab = config.model.spec.vocab_size
    return [
        Request(f"r{i}", tuple(rng.randrange(vocab) for _ in range(given.prompt)), sampling, 0.0)
        for i in range(given.batch)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=1, help="sequences that decode at once")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens of each")
    parser.add_argument("--steps", type=int, default=200, help="tokens of each")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--quantize", default=None, help="int8 or int4")
    parser.add_argument("--kv-dtype", default="auto", help="auto or int8")
    parser.add_argument("--no-tape", action="store_true", help="run call by call, to compare")
    given = parser.parse_args()
    device = detect_device()
    args = EngineArgs(
        model=given.model, kv_memory="512MiB", threads=given.threads, quantize=given.quantize,
        kv_dtype=given.kv_dtype,
    )  # fmt: skip
    config, _ = configure(args, device)
    executor = LocalExecutor(config)
    runner = executor.worker.runner
    if given.no_tape:
        runner.tape = None
    kernels, sampling = Stopwatch(), Stopwatch()
    if runner.tape is not None:
        runner.tape.run = kernels.around(runner.tape.run)  # type: ignore[method-assign]
    else:
        runner._logits = kernels.around(runner._logits)  # type: ignore[method-assign]
    runner._sample = sampling.around(runner._sample)  # type: ignore[method-assign]
    core = EngineCore(Scheduler(config.scheduler, config.cache), executor, WallClock())
    for request in requests(config, given):
        core.put(request)
    rows: list[tuple[float, float, float]] = []
    timed: list[dict[str, float]] = []
    while core.has_work:
        kernels.take(), sampling.take()
        start = time.perf_counter()
        events = core.step()
        step_s = time.perf_counter() - start
        if len(events) == given.batch and all(len(event.token_ids) == 1 for event in events):
            rows.append((step_s, kernels.take(), sampling.take()))
            if runner.tape is not None and len(rows) == given.steps // 2:
                # Of the step just taken: the last ones have fewer sequences.
                timed = [runner.tape.run_timed(given.batch, given.batch) for _ in range(30)]
    total, kernel, sample = (median(column) * 1e3 for column in zip(*rows[2:], strict=True))
    engine = median(row[0] - row[1] - row[2] for row in rows[2:]) * 1e3
    print(f"{given.model}, batch {given.batch}, {len(rows)} steps, {config.runner.num_threads} threads")
    print(f"step {total:.3f} ms = kernels {kernel:.3f} + sampling {sample:.3f} + engine {engine:.3f}")
    if runner.tape is None:
        return
    ops = {name: median(one[name] for one in timed) * 1e3 for name in timed[0]}
    print("kernels by op, ms:", ", ".join(f"{name} {ms:.3f}" for name, ms in sorted(ops.items())))
    small = sum(ms for name, ms in ops.items() if not any(big in name for big in ("Linear", "Attention")))
    print(f"engine + small ops + sampling = {engine + small + sample:.3f} ms")


if __name__ == "__main__":
    main()
