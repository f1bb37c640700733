"""The cost of LoRA adapters in a batch: the base model alone beside the same base with adapters, in alternating steps.

    python benchmarks/lora.py /tmp/models/llama-1b [--batch 32] [--adapters 8] [--rank 16] [--steps 40] [--no-tape]
    python benchmarks/lora.py /tmp/models/llama-1b --targets q_proj,v_proj

Two engines of one model in this process, one without room for adapters. Both decode the same ``--batch`` requests; each
step of one is followed by a step of the other, so that other load on the machine falls on both alike. In the second
the requests have ``--adapters`` random adapters of all linears (or ``--targets``), dealt out in turn; then none, which
is the cost of the slots alone. Times are medians; a ratio is the sum of one side's step times over the other's.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

from quire.args import EngineArgs
from quire.clock import WallClock
from quire.device import detect_device
from quire.engine.assemble import configure
from quire.engine.core import EngineCore
from quire.engine.messages import AbortRequest
from quire.executor.local import LocalExecutor
from quire.families import weight_map
from quire.modelspec import ModelSpec
from quire.request import Adapter, Request, SamplingParams, Terms
from quire.scheduler.scheduler import Scheduler
from quire.weight_plan import adaptable


class Engine:
    """A core whose steps are timed from outside."""

    def __init__(self, args: EngineArgs, *, tape: bool) -> None:
        config, _ = configure(args, detect_device())
        self.config = config
        executor = LocalExecutor(config)
        if not tape:
            executor.worker.runner.tape = None
        self.taped = executor.worker.runner.tape is not None
        self._core = EngineCore(Scheduler(config.scheduler, config.cache), executor, WallClock())
        self._num_requests = 0

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        return () if self.config.lora is None else self.config.lora.adapters

    def add(self, count: int, prompt: int, output: int, adapters: Sequence[Adapter | None]) -> None:
        """Add requests with the same prompts for the same ``count``, and adapters in turn."""
        rng = random.Random(count + prompt)
        vocab = self.config.model.spec.vocab_size
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, seed=1)
        for index in range(count):
            ids = tuple(rng.randrange(vocab) for _ in range(prompt))
            request = Request(
                f"r{self._num_requests}", ids, sampling, 0.0, Terms(cache_salt=str(self._num_requests))
            )
            self._num_requests += 1
            self._core.put(replace(request, adapter=adapters[index % len(adapters)]))

    def step(self) -> float:
        """Return the seconds of one step."""
        start = time.perf_counter()
        events = self._core.step()
        spent = time.perf_counter() - start
        assert all(event.error is None for event in events), [e.error for e in events if e.error][:1]
        return spent

    def clear(self) -> None:
        for index in range(self._num_requests):
            self._core.put(AbortRequest(f"r{index}"))
        while self._core.has_work:
            self._core.step()


def write_adapters(
    folder: Path, spec: ModelSpec, count: int, rank: int, targets: tuple[str, ...]
) -> tuple[str, ...]:
    """Random adapters as PEFT stores them; returns ``name=path`` of each."""
    sources, named = weight_map(spec).sources, []
    linears = {
        sources[f"{name}.weight"][0].names[0].removesuffix(".weight"): sources[f"{name}.weight"][0].shape
        for name in adaptable(spec)
    }
    if targets:
        linears = {name: shape for name, shape in linears.items() if name.rpartition(".")[2] in targets}
    for index in range(count):
        stored = {}
        for name, (out, into) in linears.items():
            for which, shape in (("A", (rank, into)), ("B", (out, rank))):
                tensor = torch.randn(shape, dtype=torch.float32) * 0.02
                stored[f"base_model.model.{name}.lora_{which}.weight"] = tensor.to(torch.bfloat16)
        path = folder / str(index)
        path.mkdir()
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank,
                  "target_modules": sorted({name.rpartition(".")[2] for name in linears})}  # fmt: skip
        (path / "adapter_config.json").write_text(json.dumps(config))
        save_file(stored, path / "adapter_model.safetensors")
        named.append(f"adapter-{index}={path}")
    return tuple(named)


def beside(base: Engine, other: Engine, adapters: Sequence[Adapter | None], given: argparse.Namespace) -> str:
    """Decode in both, a step of each in turn; return a line of the table."""
    times: tuple[list[float], list[float]] = ([], [])
    prefill = []
    for engine, which in ((base, (None,)), (other, adapters)):
        engine.add(given.batch, given.prompt, given.steps + 8, which)
        prefill.append(engine.step())  # all prompts in one step
        engine.step()
    for _ in range(given.steps):
        for engine, into in zip((base, other), times, strict=True):
            into.append(engine.step())
    for engine in (base, other):
        engine.clear()
    ours, theirs = (1e3 * median(each) for each in times)
    cost = sum(times[1]) / sum(times[0])
    rate = given.batch / median(times[0]), given.batch / median(times[1])
    return (
        f"{ours:.1f} | {theirs:.1f} | {rate[0]:.0f} | {rate[1]:.0f} | {1 - 1 / cost:+.1%} | "
        f"{prefill[0]:.2f} | {prefill[1]:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", default="", help="names of linears, comma-separated [all]")
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens of each request")
    parser.add_argument("--steps", type=int, default=40, help="decode steps of each engine")
    parser.add_argument("--rounds", type=int, default=3, help="adapters, none, adapters, none …")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--quantize", default=None)
    parser.add_argument("--no-tape", action="store_true", help="the second engine's steps run call by call")
    given = parser.parse_args()
    args = EngineArgs(model=given.model, kv_memory="1GiB", threads=given.threads, quantize=given.quantize)
    base = Engine(args, tape=True)
    targets = tuple(filter(None, given.targets.split(",")))
    with tempfile.TemporaryDirectory() as folder:
        named = write_adapters(Path(folder), base.config.model.spec, given.adapters, given.rank, targets)
        other = Engine(replace(args, lora=named), tape=not given.no_tape)
        print(f"{given.model}, {given.batch} requests, {given.adapters} adapters of rank {given.rank} on "
              f"{given.targets or 'all linears'}, {base.config.runner.num_threads} threads, "
              f"{base.config.runner.kernels}, recorded steps: {base.taped}, {other.taped}")  # fmt: skip
        print(
            "| | base ms | with ms | base tok/s | with tok/s | throughput lost | base prefill s | with prefill s |"
        )
        print("|---|---|---|---|---|---|---|---|")
        arms = (("adapters", other.adapters), ("room, none used", (None,)))
        for index in range(given.rounds):
            name, adapters = arms[index % 2]
            print(f"| {name} | {beside(base, other, adapters, given)} |", flush=True)


if __name__ == "__main__":
    main()
