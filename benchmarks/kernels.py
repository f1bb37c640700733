"""Time the kernels of one level beside what the machine gives in the same minute.

    python benchmarks/kernels.py [--isa avx512] [--threads 2] [--seconds 0.3]

Rates are medians. Linear: GB/s are of weights, which rotate over enough matrices to leave the caches. Attention: GB/s
are of keys and values, GFLOP/s count the positions that are seen. Bounds, before and after: a sum over 512 MiB (read),
and a linear whose panel and rows stay in L1 and L2 (dot).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import cycle

import torch

from quire import _native
from quire.kernels import cases, registry
from quire.kernels.attention import attention
from quire.kernels.linear import PackedLinear, linear, pack_empty, write_rows
from quire.kernels.registry import Backend

LINEARS = ((2048, 8192), (8192, 2048), (576, 1536))  # in_features, out_features
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
COLD_BYTES = 128 << 20


def seconds_of(run: Callable[[], object], budget_s: float) -> float:
    """Return the median time of one call, of at least three."""
    run()
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < budget_s:
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def packed(out_features: int, in_features: int, isa: Backend) -> PackedLinear:
    made = pack_empty(out_features, in_features, torch.bfloat16, bias=False, backend=isa)
    write_rows(made, 0, torch.randn(out_features, in_features).bfloat16())
    return made


def bounds(isa: Backend, threads: int, budget_s: float) -> str:
    memory = torch.ones(128 << 20)
    read = 512 * 2**20 / seconds_of(memory.sum, budget_s) / 1e9
    weight, x = packed(64 * threads, 512, isa), torch.randn(480, 512).bfloat16()
    dot = 2 * 480 * 512 * 64 * threads / seconds_of(lambda: linear(x, weight), budget_s) / 1e9
    return f"bounds now: read {read:.1f} GB/s, dot {dot:.0f} GFLOP/s"


def bench_linear(isa: Backend, budget_s: float) -> None:
    for in_features, out_features in LINEARS:
        num_bytes = 2 * in_features * out_features
        matrices = cycle([packed(out_features, in_features, isa) for _ in range(1 + COLD_BYTES // num_bytes)])
        for rows in ROWS:
            x = torch.randn(rows, in_features).bfloat16()
            taken = seconds_of(lambda x=x, matrices=matrices: linear(x, next(matrices)), budget_s)  # type: ignore[misc]
            print(
                f"linear     {in_features:5d} x {out_features:5d}  M {rows:4d}  {taken * 1e6:9.1f} us"
                f"  {num_bytes / taken / 1e9:6.1f} GB/s  {rows * num_bytes / taken / 1e9:7.1f} GFLOP/s"
            )


def bench_attention(isa: Backend, budget_s: float) -> None:
    heads, kv_heads, dim = 32, 8, 64
    for context in (512, 2048, 8192):
        for seqs, queries in ((1, 1), (8, 1), (1, 512)):
            lengths = ((queries, context),) * seqs
            case = cases.AttentionCase("bench", lengths, heads, kv_heads, dim, dim)
            made = cases.attention_inputs(case, torch.bfloat16, torch.Generator().manual_seed(0))
            taken = seconds_of(
                lambda made=made: attention(made.q, made.kv, made.batch, made.shape, backend=isa),  # type: ignore[misc]
                budget_s,
            )
            num_bytes = 4 * seqs * context * kv_heads * dim
            flops = 4 * heads * dim * seqs * sum(range(context - queries + 1, context + 1))
            print(
                f"attention  {seqs} x {queries:3d} queries at {context:5d}  {taken * 1e6:11.1f} us"
                f"  {num_bytes / taken / 1e9:6.1f} GB/s  {flops / taken / 1e9:7.1f} GFLOP/s"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--isa", default=_native.best_isa(), choices=registry.NATIVE_LEVELS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each line")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        print(f"{args.isa}, {args.threads} threads; {bounds(args.isa, args.threads, args.seconds)}")
        bench_linear(args.isa, args.seconds)
        bench_attention(args.isa, args.seconds)
        print(bounds(args.isa, args.threads, args.seconds))


if __name__ == "__main__":
    main()
