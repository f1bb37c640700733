"""Tensor parallelism on this machine: two ranks with a thread each beside one process with two threads, and all_reduce.

    python benchmarks/parallel.py collectives
    python benchmarks/parallel.py model /path/to/model [--quantize int8] [--rounds 3]

``collectives`` prints the time of an all_reduce of [32, 2048] fp32 in shared memory, as a recorded step runs it, and
over Gloo, beside the time that one core takes to read 256 KiB which the other has just written. ``model`` prints tokens
per second of prefill (one
prompt of 512 tokens) and decode (batches of 1 and 8), in rounds that alternate, and the ratios of the medians.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from quire.args import EngineArgs
from quire.clock import WallClock
from quire.config import EngineConfig
from quire.device import detect_device
from quire.engine.assemble import configure
from quire.kernels.collective import Group
from quire.kernels.collective.distributed import TorchGroup
from quire.kernels.collective.native import attach
from quire.kernels.tape import StepTape
from quire.kernels.threads import choose_threads
from quire.layers.weights import TensorParallel
from quire.models.loader import iter_weights
from quire.parallel.segment import SLOT_BYTES, Segment, remove
from quire.parallel.shard import shard
from quire.parallel.topology import Topology
from quire.request import Sampling
from quire.runner.memory import keep_freed_memory, torch_dtype
from quire.runner.model_runner import ModelRunner, rank_config
from quire.runner.worker import Worker
from quire.step import NewSeq, SeqPlan, StepPlan

PROMPT, DECODED = 512, 24
REPEATED = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["collectives", "model"])
    parser.add_argument("model", nargs="?", default="/tmp/models/llama-1b")
    parser.add_argument("--quantize")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if args.what == "collectives":
        collectives()
    else:
        model(args.model, args.quantize, args.rounds)


def collectives() -> None:
    """Two processes, pinned to the first two cores."""
    topology, name = Topology(2), f"quire-bench-{os.getpid()}"
    Segment.create(name, topology)
    folder = tempfile.mkdtemp()
    context = multiprocessing.get_context("spawn")
    try:
        other = context.Process(target=_collectives, args=(name, topology, folder, 1))
        other.start()
        _collectives(name, topology, folder, 0)
        other.join()
    finally:
        remove(name)


def _collectives(name: str, topology: Topology, folder: str, rank: int) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    choose_threads(1, torch_is_heavy=False)
    keep_freed_memory()
    segment = Segment.attach(name, topology)
    group = attach(segment, rank).of_layers
    assert group is not None
    x, token = torch.randn(32, 2048), torch.zeros(1, 16)
    calls = {f"all_reduce [32, 2048] fp32 to {out}": out for out in (torch.float32, torch.bfloat16)}
    tapes = {what: _recorded(group, x, out) for what, out in calls.items()}
    last = segment.address + len(segment._memory) - SLOT_BYTES  # no message above needs it
    written = torch.frombuffer((ctypes.c_char * (1 << 18)).from_address(last), dtype=torch.float32)
    read = torch.zeros(65536)
    reading = "reading 256 KiB that the other core wrote"
    found: dict[str, list[float]] = {
        what: [] for what in (reading, *tapes, "all_reduce [1, 16], from Python")
    }
    for _ in range(2000):  # in turn, so that whatever else runs on the machine disturbs all alike
        for what, tape in tapes.items():
            group.all_reduce(token, torch.float32)
            found[what].append(_seconds(lambda tape=tape: tape.run(32, 1)) / REPEATED)  # type: ignore[misc]
        if rank == 1:
            written.add_(1.0)
        group.all_reduce(token, torch.float32)
        found[reading].append(_seconds(lambda: read.copy_(written)) if rank == 0 else 0.0)
        found["all_reduce [1, 16], from Python"].append(
            _seconds(lambda: group.all_reduce(token, torch.float32))
        )
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    gloo = TorchGroup()
    found["all_reduce [32, 2048] fp32, Gloo"] = [
        _seconds(lambda: gloo.all_reduce(x, torch.float32)) for _ in range(200)
    ]
    dist.destroy_process_group()
    if rank == 0:
        base = statistics.median(found[reading])
        for what, taken in found.items():
            times = sorted(taken)
            marks = [times[0], *(times[len(times) * percent // 100] for percent in (10, 50, 90))]
            text = "   ".join(
                f"{name} {mark * 1e6:7.1f}"
                for name, mark in zip(("min", "p10", "p50", "p90"), marks, strict=True)
            )
            print(f"{what:44}  {text} us   p50 is {marks[2] / base:.2f} x the read")


def _recorded(group: Group, x: torch.Tensor, out: torch.dtype) -> StepTape:
    """Record a step of ``REPEATED`` sums: Python's part of a call is none of the step's."""

    def forward() -> torch.Tensor:
        for _ in range(REPEATED):
            y = group.all_reduce(x, out)
        return y[:1]

    return StepTape(forward, x.shape[0], 1)


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def model(path: str, quantize: str | None, rounds: int) -> None:
    args = EngineArgs(model=path, quantize=quantize, max_model_len=1024, max_num_seqs=8, kv_memory="1GiB")
    config = configure(args, detect_device())[0]
    topology, name = Topology(2), f"quire-bench-{os.getpid()}"
    Segment.create(name, topology)
    context = multiprocessing.get_context("spawn")
    pipes = []
    try:
        for rank in (-1, 0, 1):  # -1: one process with two threads
            ours, theirs = context.Pipe()
            context.Process(target=_serve, args=(theirs, config, name, topology, rank), daemon=True).start()
            pipes.append(ours)
        for pipe in pipes:
            pipe.recv()
        results: dict[str, list[tuple[float, ...]]] = {"one process": [], "two ranks": []}
        for _ in range(rounds):
            for what, members in (("one process", pipes[:1]), ("two ranks", pipes[1:])):
                for pipe in members:
                    pipe.send("go")
                answers = [pipe.recv() for pipe in members]
                results[what].append(answers[0])
    finally:
        remove(name)
    medians = {
        what: [statistics.median(each) for each in zip(*of, strict=True)] for what, of in results.items()
    }
    for index, what in enumerate((f"prefill of {PROMPT}", "decode, batch 1", "decode, batch 8")):
        one, two = medians["one process"][index], medians["two ranks"][index]
        print(
            f"{quantize or config.model.dtype:9} {what:16} {one:9.2f} {two:9.2f} tokens/s   {two / one:.3f}"
        )


def _serve(pipe: Connection, config: EngineConfig, name: str, topology: Topology, rank: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if rank >= 0:
        os.sched_setaffinity(0, {cores[rank]})
    config = replace(config, runner=replace(config.runner, num_threads=2 if rank < 0 else 1))
    choose_threads(config.runner.num_threads, torch_is_heavy=False)
    keep_freed_memory()
    model, dtype = config.model, torch_dtype(config.model.dtype)
    if rank < 0:
        worker = Worker(config, iter_weights(model, dtype), WallClock())
    else:
        mine = shard(model.spec, topology, rank, model.formats)
        group = attach(Segment.attach(name, topology), rank, 300).of_layers
        assert group is not None
        runner = partial(ModelRunner, tp=TensorParallel(group, mine))
        weights = iter_weights(model, dtype, cuts=mine.cuts)
        worker = Worker(rank_config(config, mine), weights, WallClock(), runner, shard=mine)
    pipe.send("ready")
    step = 0
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        rates = []
        for count, length in ((1, PROMPT), (1, 32), (8, 32)):
            prefill, decode, step = _run(worker, count, length, step)
            rates.append(prefill if length == PROMPT else decode)
        pipe.send(tuple(rates))


def _run(worker: Worker, count: int, length: int, step: int) -> tuple[float, float, int]:
    """Return tokens per second of the prompts and of decoding, and the next step's number."""
    size = 16
    rows = -(-(length + DECODED) // size)
    seqs = [step * 100 + i for i in range(count)]
    sampling = Sampling(temperature=0.0, seed=1, max_tokens=DECODED + 1)
    new = tuple(NewSeq(seq, 0, tuple(range(100, 100 + length)), (), sampling, 0) for seq in seqs)
    plans = tuple(
        SeqPlan(seq, 0, 0, length, (0,), (tuple(range(i * rows, (i + 1) * rows)),))
        for i, seq in enumerate(seqs)
    )
    start = time.perf_counter()
    worker.execute(StepPlan(step, new, plans))
    prefill_s = time.perf_counter() - start
    start = time.perf_counter()
    for done in range(DECODED):
        step += 1
        worker.execute(StepPlan(step, seqs=tuple(SeqPlan(seq, 0, length + done, 1) for seq in seqs)))
    decode_s = time.perf_counter() - start
    step += 1
    worker.execute(StepPlan(step, gone=tuple(seqs)))
    return count * length / prefill_s, count * DECODED / decode_s, step + 1


if __name__ == "__main__":
    main()
