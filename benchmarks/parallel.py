"""Ranks on this machine: two with a thread each beside one process with two threads, and all_reduce.

    python benchmarks/parallel.py collectives
    python benchmarks/parallel.py model /path/to/model [--quantize bf16 int8 int4] [--rounds 3] [--prompt 512]
    python benchmarks/parallel.py experts /tmp/models/qwen3-moe-4x32 [--quantize …] [--rounds 3]

``collectives`` prints the time of an all_reduce of [32, 2048] fp32 in shared memory, as a recorded step runs it, and
over Gloo, beside the time that one core takes to read 256 KiB which the other has just written. ``model`` prints tokens
per second of a prompt, of decoding one sequence (behind the prompt, if that is longer than 512 tokens), and of 32
sequences at once with their prompts, in rounds that alternate: medians, and their ratios to one process; the seconds
until an engine is ready, and the bubbles.
``experts`` does so for a model with experts (benchmarks/make_checkpoint.py), cut and whole.
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
from typing import Any

import torch
import torch.distributed as dist

from quire import LLM
from quire.kernels.collective import Group
from quire.kernels.collective.distributed import TorchGroup
from quire.kernels.collective.native import attach
from quire.kernels.tape import StepTape
from quire.kernels.threads import choose_threads
from quire.metrics.engine_stats import RankStats
from quire.parallel.segment import SLOT_BYTES, Segment, remove
from quire.parallel.topology import Topology
from quire.request import SamplingParams
from quire.runner.memory import keep_freed_memory

DECODED, BATCH = 32, 32
ENGINES: dict[str, dict[str, Any]] = {
    "one process": {"threads": 2},
    "two ranks by rows": {"threads": 1, "tensor_parallel_size": 2, "tensor_parallel_layout": "rows"},
    "two ranks by sums": {"threads": 1, "tensor_parallel_size": 2, "tensor_parallel_layout": "sums"},
    "two stages": {"threads": 1, "pipeline_parallel_size": 2},
    "two stripes": {"threads": 1, "context_parallel_size": 2},
}
WHOLE = {"threads": 1, "tensor_parallel_size": 2, "enable_expert_parallel": True}
EXPERTS = {
    **{what: ENGINES[what] for what in ("one process", "two ranks by sums")},
    "whole experts": WHOLE,
    "balanced experts": {**WHOLE, "enable_eplb": True, "num_redundant_experts": 4, "eplb_step_interval": 20},
}
REPEATED = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["collectives", "model", "experts"])
    parser.add_argument("model", nargs="?", default="/tmp/models/llama-1b")
    parser.add_argument("--quantize", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="beside one process: words of the engines' names")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    args = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if args.what == "collectives":
        collectives()
    else:
        for each in args.quantize:
            sizes = EXPERTS if args.what == "experts" else ENGINES
            if args.only:
                wanted = ("one process", *args.only)
                sizes = {what: of for what, of in sizes.items() if any(word in what for word in wanted)}
            model(args.model, None if each == "bf16" else each, args.rounds, args.prompt, sizes)


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


def model(
    path: str, quantize: str | None, rounds: int, prompt: int, wanted: dict[str, dict[str, Any]]
) -> None:
    """Engines as `LLM` starts them, all loaded, each at work in its turn."""
    engines, loaded_s = {}, {}
    behind = prompt if prompt > 512 else 16  # tokens before those that are decoded
    for what, sizes in wanted.items():
        start = time.perf_counter()
        engines[what] = LLM(
            path, quantize=quantize, max_model_len=prompt + 512, max_num_seqs=32, kv_memory="512MiB",
            enable_prefix_caching=False, **sizes,
        )  # fmt: skip
        loaded_s[what] = time.perf_counter() - start
    rates: dict[str, list[list[float]]] = {what: [] for what in wanted}
    ids: dict[str, list[list[int]]] = {}
    idle = dict.fromkeys(wanted, 0.0)
    for _ in range(rounds):
        for what, llm in engines.items():
            prefill_s, _ = _generate(llm, 1, prompt, 1)
            first_s, _ = _generate(llm, 1, behind, 1)
            decode_s, _ = _generate(llm, 1, behind, 1 + DECODED)
            before = llm.client.stats().ranks
            batch_s, ids[what] = _generate(llm, BATCH, 64, DECODED)
            idle[what] = _idle(before, llm.client.stats().ranks)
            rates[what].append(
                [prompt / prefill_s, DECODED / (decode_s - first_s), BATCH * DECODED / batch_s]
            )
    base = [statistics.median(each) for each in zip(*rates["one process"], strict=True)]
    print(
        f"{quantize or 'bf16':22}"
        + "".join(f"{what:>22}" for what in ("prefill", "decode", f"{BATCH} at once"))
        + "   start  idle"
    )
    for what, of in rates.items():
        found = [statistics.median(each) for each in zip(*of, strict=True)]
        text = "".join(f"{rate:9.1f}/s ({rate / one:5.3f} x)" for rate, one in zip(found, base, strict=True))
        print(f"{what:22}{text}   {loaded_s[what]:4.1f} s  {idle[what]:4.0%}")
    same = [what for what in wanted if ids[what] == ids["one process"]]
    print(f"the tokens of one process: {', '.join(same)}")
    for what, llm in engines.items():
        for load in llm.client.stats().ranks.experts:
            print(
                f"{what}, layer {load.layer}: busiest rank / mean {load.of_ranks:.3f}, after moves "
                f"{load.of_ranks_balanced:.3f}; busiest expert / mean {load.of_experts:.2f}"
            )
    for llm in engines.values():
        llm.close()


def _generate(llm: LLM, count: int, length: int, new: int) -> tuple[float, list[list[int]]]:
    """Return the seconds of ``count`` prompts with ``new`` tokens after each, and these tokens."""
    prompts = [[100 + (7 * i + j) % 5000 for j in range(length)] for i in range(count)]
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start, [list(each.outputs[0].token_ids) for each in outputs]


def _idle(before: RankStats, after: RankStats) -> float:
    """Return the share of the ranks' time in which they waited for another stage though a step was out."""
    if not after.out_s:
        return 0.0  # one process
    busy = sum(after.busy_s) - sum(before.busy_s)
    return 1.0 - busy / len(after.busy_s) / (after.out_s - before.out_s)


if __name__ == "__main__":
    main()
