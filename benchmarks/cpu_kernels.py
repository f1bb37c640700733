"""Time single CPU ops of one level beside the bounds of the machine: `python -m benchmarks.cpu_kernels [--op …]`.

Shapes are the cases marked ``bench`` of `tests.kernels.cases`, those that the tests use. A `Job` says what its op must
move and compute; its bound is the slower of bytes over read bandwidth and operations over the dot peak, both measured
before and after. Weights rotate over copies that no cache holds. Times are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from tests.kernels import cases

from quire.cost.hardware import Bounds, measure
from quire.device import detect_device
from quire.errors import ConfigError, nearest
from quire.kernels import registry
from quire.kernels.attention import attention
from quire.kernels.linear import PackedLinear, QuantizedWeight, linear, pack_empty, write_rows
from quire.kernels.norm import add_rms_norm, rms_norm
from quire.kernels.quantized_rows import num_groups
from quire.kernels.registry import Backend
from quire.kernels.sampling.noise import Streams, gumbel_argmax
from quire.kernels.threads import choose_threads
from quire.kernels.workspace import huge_zeros
from quire.weight_format import PLAIN, WeightFormat

COLD_BYTES = 512 << 20
VOCAB = 128256
FORMATS = (
    PLAIN,
    WeightFormat("int8"),
    WeightFormat("int8", 32),
    WeightFormat("int4", 16),
    WeightFormat("int4", 32),
    WeightFormat("int4", 128, True),
)


@dataclass(frozen=True, slots=True)
class Job:
    """One call of an op, and what it must do at least."""

    op: str
    case: str
    isa: Backend  # of the version that runs: an op that gains nothing by a level takes the one below
    num_bytes: int
    operations: int
    unit: Literal["float", "int8"]
    call: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. ``share`` of the bound; None where the level has no measured dot peak."""

    op: str
    case: str
    isa: str
    microseconds: float
    gb_s: float
    gop_s: float
    bound_us: float | None
    share: float | None


def version_of(op: str, isa: Backend) -> Backend | None:
    """Return the level that runs ``op`` in an engine of level ``isa``, None where it has no native version."""
    here = registry.backends(op)
    below = registry.NATIVE_LEVELS[registry.NATIVE_LEVELS.index(isa) :]
    allowed = below[:2] if isa == "amx" else below[:1]
    return next((level for level in allowed if level in here), None)


def format_name(format: WeightFormat) -> str:
    if not format.quantized:
        return "bf16"
    return (
        format.kind + (f" g{format.group}" if format.group else "") + (" offset" if format.has_offset else "")
    )


def random_weight(format: WeightFormat, shape: tuple[int, int]) -> torch.Tensor | QuantizedWeight:
    if not format.quantized:
        return torch.randn(shape).bfloat16()
    low, high = (-127, 128) if format.kind == "int8" else (-8, 8)
    scales = (shape[0], num_groups(shape[1], format.group))
    offset = torch.rand(scales) if format.has_offset else None
    q = torch.randint(low, high, shape, dtype=torch.int8)
    if format.two_level:
        multiplier = torch.randint(1, 16, scales, dtype=torch.uint8)
        return QuantizedWeight(format, q, torch.rand(shape[0], 1) + 0.5, multiplier=multiplier)
    return QuantizedWeight(format, q, torch.rand(scales) + 0.5, offset)


def copy_of(packed: PackedLinear) -> PackedLinear:
    """Return the same matrix elsewhere, in huge pages as an engine's weights are."""
    other = copy(packed)
    other.data = huge_zeros(*packed.data.shape, dtype=packed.data.dtype).copy_(packed.data)
    other.bias = None
    other.scale = None if packed.scale is None else packed.scale.clone()
    other.offset = None if packed.offset is None else packed.offset.clone()
    return other


def held_bytes(packed: PackedLinear) -> int:
    parts = (packed.data, packed.scale, packed.offset)
    return sum(part.numel() * part.element_size() for part in parts if part is not None)


def linear_jobs(isa: Backend) -> Iterator[Job]:
    for format in FORMATS:
        level = version_of("quantized_linear" if format.quantized else "linear", isa)
        if level is None:
            continue
        table = cases.QUANTIZED if format.quantized else cases.LINEAR
        shapes = [case for case in table if case.bench]
        for out_features, in_features in dict.fromkeys((c.out_features, c.in_features) for c in shapes):
            first = pack_empty(
                out_features, in_features, torch.bfloat16, bias=False, backend=level, format=format
            )
            write_rows(first, 0, random_weight(format, (out_features, in_features)))
            num_bytes = held_bytes(first)
            copies = cycle([first, *(copy_of(first) for _ in range(COLD_BYTES // num_bytes))])
            for case in shapes:
                if (case.out_features, case.in_features) != (out_features, in_features):
                    continue
                x = torch.randn(case.num_tokens, in_features).bfloat16()
                moved = num_bytes + 2 * case.num_tokens * (in_features + out_features)
                yield Job(
                    "linear",
                    f"{format_name(format)}, {in_features} to {out_features}, {case.num_tokens} rows",
                    level,
                    moved,
                    2 * case.num_tokens * in_features * out_features,
                    "int8" if format.quantized else "float",
                    lambda x=x, copies=copies: linear(x, next(copies)),  # type: ignore[misc]
                )


def attention_jobs(isa: Backend) -> Iterator[Job]:
    level = version_of("attention", isa)
    benched = [case for case in cases.ATTENTION if case.bench]
    forms = ((16, 16), (8, 8), (4, 4))
    in_tiles = (case.in_tiles(bits) for case in benched for bits in forms)  # as an engine's cache is
    for case in in_tiles:
        if case is None or level is None:
            continue
        made = cases.attention_inputs(case, torch.bfloat16, torch.Generator().manual_seed(0))
        pairs = sum(q * n - q * (q - 1) // 2 for q, n in case.lengths)
        num_tokens = sum(n for _, n in case.lengths)
        size = case.head_dim + case.v_head_dim
        yield Job(
            "attention",
            case.name,
            level,
            num_tokens * made.kv.num_kv_heads * made.kv.pieces[0, 0].nbytes // case.block_size,
            2 * pairs * case.num_heads * size,
            "float",
            lambda made=made: attention.on(level)(made.q, made.kv, made.batch, made.shape, None),  # type: ignore[misc]
        )


def norm_jobs(isa: Backend) -> Iterator[Job]:
    level = version_of("rms_norm", isa)
    for case in cases.ROWS:
        if not case.bench or level is None:
            continue
        shape = (case.num_tokens, case.size)
        x, weight = torch.randn(shape).bfloat16(), torch.ones(case.size)
        residual = torch.randn(shape).bfloat16()
        words, num_bytes = f"{case.num_tokens} x {case.size}", 2 * x.numel()
        yield Job(
            "norm", f"rms_norm, {words}", level, 2 * num_bytes, 4 * x.numel(), "float",
            lambda x=x, weight=weight: rms_norm.on(level)(x, weight, 1e-5),  # type: ignore[misc]
        )  # fmt: skip
        yield Job(
            "norm", f"add_rms_norm, {words}", level, 4 * num_bytes, 5 * x.numel(), "float",
            lambda x=x, r=residual, weight=weight: add_rms_norm.on(level)(x, r, weight, 1e-5),  # type: ignore[misc]
        )  # fmt: skip


def sampling_jobs(isa: Backend) -> Iterator[Job]:
    for rows in (1, 32):
        scores = torch.randn(rows, VOCAB)
        zeros = torch.zeros(rows, dtype=torch.int64)
        streams = Streams(zeros + 1, zeros, zeros)
        yield Job(
            "sampling", f"gumbel_argmax, {rows} x {VOCAB}", isa, 4 * scores.numel(), 0, "float",
            lambda scores=scores, streams=streams: gumbel_argmax(scores, streams),  # type: ignore[misc]
        )  # fmt: skip


JOBS: dict[str, Callable[[Backend], Iterator[Job]]] = {
    "linear": linear_jobs,
    "attention": attention_jobs,
    "norm": norm_jobs,
    "sampling": sampling_jobs,
}


def median_seconds(call: Callable[[], object], budget_s: float) -> float:
    """Return the median time of one call, of at least three."""
    call()
    taken: list[float] = []
    begin = time.perf_counter()
    while len(taken) < 3 or time.perf_counter() - begin < budget_s:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def row_of(job: Job, seconds: float, bounds: Bounds) -> Row:
    peak = bounds.peak(job.isa, job.unit)
    bound = None if peak is None else max(job.num_bytes / bounds.read, job.operations / peak)
    return Row(
        job.op, job.case, job.isa, seconds * 1e6, job.num_bytes / seconds / 1e9, job.operations / seconds / 1e9,
        None if bound is None else bound * 1e6, None if bound is None else bound / seconds,
    )  # fmt: skip


def mean(before: Bounds, after: Bounds) -> Bounds:
    """Return the bounds halfway between two measurements."""
    return Bounds(
        (before.read + after.read) / 2,
        {name: (rate + after.dots[name]) / 2 for name, rate in before.dots.items()},
    )


def check_choices(op: str | None, isa: str) -> None:
    """Refuse an op or a level that is not there.

    Raises:
        ConfigError: names the flag, the value and what is allowed.
    """
    if op is not None and op not in JOBS:
        raise ConfigError(f"--op {op!r}: must be one of {', '.join(JOBS)}{nearest(op, JOBS)}")
    here = registry.backends("rms_norm") + registry.backends("linear")
    levels = [level for level in registry.NATIVE_LEVELS if level in here]
    if isa not in levels:
        raise ConfigError(
            f"--isa {isa!r}: this CPU and build have {', '.join(levels) or 'no native kernels'}"
        )


def run(op: str | None, isa: Backend, num_threads: int, budget_s: float) -> tuple[Bounds, list[Row]]:
    """Time the ops (all of them for ``op`` None) and return the bounds with one row a case.

    ``budget_s``: seconds for each case.

    Raises:
        ConfigError: an op or a level that is not there.
    """
    check_choices(op, isa)
    choose_threads(num_threads, torch_is_heavy=False)
    before = measure(num_threads)
    timed: list[tuple[Job, float]] = []
    with torch.inference_mode():
        for name, make in JOBS.items():
            if op in (None, name):
                timed += [(job, median_seconds(job.call, budget_s)) for job in make(isa)]
    bounds = mean(before, measure(num_threads))
    return bounds, [row_of(job, seconds, bounds) for job, seconds in timed]


def as_dict(bounds: Bounds, rows: list[Row]) -> dict[str, Any]:
    return {"bounds": asdict(bounds), "rows": [asdict(row) for row in rows]}


def print_rows(level: str, num_threads: int, bounds: Bounds, rows: list[Row]) -> None:
    """Print the table."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(f"{level}, {num_threads} threads. Bounds now: {bounds}")
    table = Table("op", "case", "level", box=None, pad_edge=False)
    for heading in ("µs", "GB/s", "Gop/s", "bound µs", "of bound"):
        table.add_column(heading, justify="right")
    for row in rows:
        bound = "" if row.bound_us is None else f"{row.bound_us:.1f}"
        share = "" if row.share is None else f"{row.share:.0%}"
        speeds = (f"{row.microseconds:.1f}", f"{row.gb_s:.1f}", f"{row.gop_s:.0f}", bound, share)
        table.add_row(row.op, row.case, row.isa, *speeds)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", help=f"{', '.join(JOBS)} [all]")
    parser.add_argument("--isa", help="level of the kernels [the best of this CPU]")
    parser.add_argument("--threads", type=int, help="threads [one per core]")
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each row")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    device = detect_device()
    level, num_threads = args.isa or device.isa, args.threads or device.num_cores
    bounds, rows = run(args.op, level, num_threads, args.seconds)
    if args.json:
        print(json.dumps({"isa": level, "threads": num_threads, **as_dict(bounds, rows)}))
    else:
        print_rows(level, num_threads, bounds, rows)


if __name__ == "__main__":
    main()
