"""Seconds of a call on a GPU, and the two ceilings of the machine: memory bandwidth and the matmul peak in bf16."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import cycle

import torch

Call = Callable[[], object]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seconds(calls: Sequence[Call], *, repeats: int = 15) -> float:
    """Median seconds of one of ``calls``, taken in turn: several over other memory, so that L2 holds none of it.

    A CUDA graph of 16 calls or more is replayed, as the engine replays a step: a launch from Python takes longer than a
    small kernel. Calls that cannot be captured are timed one by one, and then a short one shows its launch.
    """
    if DEVICE.type == "cpu":  # the interpreter: one call, to see that it runs
        start_s = time.perf_counter()
        calls[0]()
        return time.perf_counter() - start_s
    turn = cycle(calls)
    for _ in range(max(3, len(calls))):
        next(turn)()
    count = -(-16 // len(calls)) * len(calls)
    run: Call
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                next(turn)()
        run = graph.replay
        run()
    except RuntimeError:  # it waits for the device, say
        torch.cuda.synchronize()
        count, run = 1, lambda: next(turn)()
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)
    ]
    for start, end in marks:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks) / 1e3 / count


def ceilings(*, tiny: bool) -> dict[str, float]:
    """Measure bytes/s (a copy: read + write; a sum: read alone) and FLOP/s of a product of 8,192 cubed."""
    size = (1 << 16) if tiny else (1 << 31)
    source = torch.zeros(size, dtype=torch.int8, device=DEVICE)
    target = torch.empty_like(source)
    copy_s = seconds([lambda: target.copy_(source)])
    wide = source.view(torch.float32)
    read_s = seconds([lambda: wide.sum()])
    n = 64 if tiny else 8192
    a, b = (torch.randn(n, n, device=DEVICE).bfloat16() for _ in range(2))
    product_s = seconds([lambda: a @ b])
    return {
        "copy_bytes_per_s": 2 * size / copy_s,
        "read_bytes_per_s": size / read_s,
        "bandwidth_bytes_per_s": max(2 * size / copy_s, size / read_s),
        "matmul_flops_per_s": 2 * n**3 / product_s,
    }
