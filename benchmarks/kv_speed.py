"""How long attention takes over K and V in bf16, 8 and 4 bits: `python -m benchmarks.kv_speed [--cases …] [--isa …]`.

Shapes are cases of `tests.kernels.cases`. The types take turns, so that a busy machine hits all of them alike, and each
has as many copies of its cache as no cache of the CPU holds. Printed are medians, and times of bf16 over them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import replace
from datetime import date
from itertools import cycle

import torch
from tests.kernels import cases

from quire.cost.hardware import measure
from quire.device import detect_device
from quire.kernels import registry
from quire.kernels.attention import attention
from quire.kernels.threads import choose_threads
from quire.kernels.workspace import huge_zeros

FORMS = {"bf16": (16, 16), "int8": (8, 8), "int8/int4": (8, 4), "int4": (4, 4)}
COLD_BYTES = 256 << 20


def inputs_of(case: cases.AttentionCase, bits: tuple[int, int]) -> list[cases.AttentionInputs]:
    """Return copies of the case in tiles of ``bits``, more than caches hold."""
    tiled = case.in_tiles(bits)
    assert tiled is not None
    made = cases.attention_inputs(tiled, torch.bfloat16, torch.Generator().manual_seed(0))
    copies = [made]
    for _ in range(COLD_BYTES // made.kv.pieces.nbytes):
        pieces = huge_zeros(*made.kv.pieces.shape, dtype=made.kv.pieces.dtype).copy_(made.kv.pieces)
        copies.append(replace(made, kv=replace(made.kv, pieces=pieces)))
    return copies


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    benched = {case.name: case for case in cases.ATTENTION if case.bench}
    parser.add_argument(
        "--cases", nargs="+", choices=benched, default=["1B decode, 8 x 8192", "1B decode, 32 x 512"]
    )
    parser.add_argument(
        "--isa", nargs="+", default=[isa for isa in registry.backends("attention") if isa != "reference"]
    )
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    device = detect_device()
    num_threads = given.threads or os.cpu_count() or 1
    choose_threads(num_threads, torch_is_heavy=False)
    print(f"{device.name}, {num_threads} threads, {date.today()}; {measure(num_threads)}")
    print(
        "| case | kernels | "
        + " | ".join(FORMS)
        + " | "
        + " | ".join(f"bf16 / {name}" for name in FORMS)
        + " |"
    )
    print("|" + " --- |" * (2 + 2 * len(FORMS)))
    for name in given.cases:
        made = {form: cycle(inputs_of(benched[name], bits)) for form, bits in FORMS.items()}
        for isa in given.isa:
            times: dict[str, list[float]] = {form: [] for form in FORMS}
            for turn in range(given.rounds + 1):
                for form, copies in made.items():
                    one = next(copies)
                    start = time.perf_counter()
                    attention.on(isa)(one.q, one.kv, one.batch, one.shape, None)
                    if turn:
                        times[form].append(time.perf_counter() - start)
            medians = {form: statistics.median(found) * 1e6 for form, found in times.items()}
            cells = [f"{us:,.0f} us" for us in medians.values()] + [
                f"{statistics.median(a / b for a, b in zip(times['bf16'], found, strict=True)):.2f}"
                for found in times.values()
            ]
            print(f"| {name} | {isa} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
