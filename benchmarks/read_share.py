"""What one row's linears read of what the memory gives: `python benchmarks/read_share.py [--seconds 40]`.

Some hosts' memory changes between two speeds within seconds, so a probe before and after an engine's run says little
of the run. Here each turn is a probe of 1 GiB and one pass over 1 GiB of weights in each precision, with all threads;
turns are grouped by what the probe read, and a share is of its own turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch

from quire import _native
from quire.device import detect_device
from quire.kernels.linear import PackedLinear, linear, pack_empty, quantize_rows, write_rows
from quire.kernels.quantized_rows import QuantizedRows
from quire.kernels.registry import Backend
from quire.kernels.threads import choose_threads
from quire.quant.rtn import quantize
from quire.weight_format import PLAIN, WeightFormat

OUT, IN = 16384, 2048  # gate and up of Llama-3.2-1B
BYTES = 1 << 30
FORMATS = {"bf16": PLAIN, "int8": WeightFormat("int8"), "int4": WeightFormat("int4", 16)}


def matrices(format: WeightFormat, backend: Backend) -> list[PackedLinear]:
    """As many equal matrices as have `BYTES` together."""
    weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(1)).bfloat16() * 0.02
    rows = quantize(weight, format, backend=backend) if format.quantized else weight
    found = []
    for _ in range(BYTES // format.num_bytes(OUT, IN, 2)):
        packed = pack_empty(OUT, IN, torch.bfloat16, bias=False, backend=backend, format=format)
        write_rows(packed, 0, rows)
        found.append(packed)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument(
        "--fast", type=float, default=45.0, help="GB/s of the probe from which memory counts as fast"
    )
    given = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    choose_threads(threads, torch_is_heavy=False)
    backend: Backend = detect_device("cpu").isa
    x = torch.randn(1, IN, generator=torch.Generator().manual_seed(2)).bfloat16()
    made: dict[str, tuple[list[PackedLinear], torch.Tensor | QuantizedRows, int]] = {}
    for name, format in FORMATS.items():
        packed = matrices(format, backend)
        row = quantize_rows(x, format.rows, backend=backend) if packed[0].reads_quantized else x
        made[name] = packed, row, len(packed) * format.num_bytes(OUT, IN, 2)
    turns: list[dict[str, float]] = []
    end = time.monotonic() + given.seconds
    while time.monotonic() < end:
        turn = {"probe": BYTES / _native.probe_read(threads, BYTES, 1) / 1e9}
        for name, (packed, row, size) in made.items():
            start = time.perf_counter()
            for matrix in packed:
                linear(row, matrix, out_dtype=torch.bfloat16)
            turn[name] = size / (time.perf_counter() - start) / 1e9
        turns.append(turn)
    print(f"{backend}, {threads} threads; GB/s, medians, in brackets the share of the turn's probe")
    for word, some in (
        ("slow", [turn for turn in turns if turn["probe"] < given.fast]),
        ("fast", [turn for turn in turns if turn["probe"] >= given.fast]),
    ):
        if some:
            cells = [f"probe {statistics.median(turn['probe'] for turn in some):.1f}"]
            for name in made:
                speed = statistics.median(turn[name] for turn in some)
                share = statistics.median(turn[name] / turn["probe"] for turn in some)
                cells.append(f"{name} {speed:.1f} ({share:.0%})")
            print(f"{word}, {len(some)} turns: " + ", ".join(cells))


if __name__ == "__main__":
    main()
