"""Try block sizes for the shapes of real models and write the table of this GPU (`quire.kernels.block_sizes`).

    python -m benchmarks.gpu.tune --ops int_linear_small attention_decode

Sizes that do not fit (shared memory) are passed over; a shape keeps what was fastest, the defaults among them.
Versions of the invariant mode are not tuned: their sizes are part of the result. Compiling takes most of the time, so
``--jobs`` processes first compile all choices into Triton's cache.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count, product
from pathlib import Path

import torch
from benchmarks.gpu.kernels import BF16, COLD_BYTES, SHAPES, random_matrix
from benchmarks.gpu.timing import DEVICE, seconds
from tests.kernels import cases
from triton.runtime.errors import OutOfResources

import quire.kernels.triton_ops  # noqa: F401  registers
from quire.kernels import block_sizes as table
from quire.kernels.attention import attention
from quire.kernels.linear import linear
from quire.kernels.linear.triton import multiplies
from quire.weight_format import PLAIN, WeightFormat

Calls = list[Callable[[], object]]
Shape = tuple[str, Calls]  # key as the op writes it, and calls at that shape over other memory
CHOICES: dict[str, dict[str, tuple[int, ...]]] = {
    "attention_decode": {"keys": (32, 64, 128), "warps": (2, 4, 8)},
    "attention_prefill": {"rows": (64, 128), "keys": (32, 64, 128), "warps": (4, 8), "stages": (2, 3, 4)},
    "plain_few": {"columns": (8, 16, 32), "inner": (64, 128), "chunks": (4, 8), "stages": (3, 4), "ahead": (8, 16)},
    "fp8_few": {"columns": (8, 16, 32), "inner": (128, 256), "chunks": (4, 8), "stages": (3, 4), "ahead": (8, 16)},
    "int8_few": {"columns": (8, 16, 32), "inner": (128, 256), "chunks": (4, 8), "stages": (3, 4), "ahead": (8, 16)},
    "int4_g128_few": {
        "columns": (8, 16, 32), "inner": (128,), "chunks": (2, 4, 8), "stages": (2, 3, 4), "ahead": (4, 16),
    },
    "int_linear_small": {
        "rows": (16,), "columns": (32, 64, 128), "inner": (128,), "warps": (2, 4, 8), "stages": (3, 4, 6),
        "programs": (264, 528, 1056),
    },
    "int_linear_large": {
        "rows": (64, 128), "columns": (64, 128, 256), "inner": (64,), "warps": (4, 8), "stages": (2, 3, 4),
    },
    "fp8_linear_small": {
        "rows": (16, 32), "columns": (32, 64, 128), "inner": (128,), "warps": (2, 4, 8), "stages": (2, 3, 4, 5),
    },
    "fp8_linear_large": {
        "rows": (64, 128), "columns": (64, 128, 256), "inner": (128,), "warps": (4, 8), "stages": (2, 3, 4),
    },
}  # fmt: skip
FEW = {
    "plain_few": PLAIN, "fp8_few": WeightFormat("fp8"), "int8_few": WeightFormat("int8"),
    "int4_g128_few": WeightFormat("int4", 128),
}  # fmt: skip


def attention_shapes(op: str, lengths: tuple[tuple[int, int], ...], *, tiny: bool) -> Iterator[Shape]:
    """The cut of the step is made once for each choice of sizes: it is no part of the kernel."""
    for dim, heads in ((16, 4),) if tiny else ((128, 32), (64, 32)):
        case = cases.AttentionCase("tune", lengths, heads, heads // 4, dim, dim)
        made = cases.attention_inputs(case, BF16, torch.Generator().manual_seed(1))
        pieces = made.kv.pieces.clone().to(DEVICE)
        kv = type(made.kv)(pieces, made.kv.block_size, dim, dim)
        q = made.q.to(DEVICE)

        def call(q=q, kv=kv, made=made) -> object:  # type: ignore[no-untyped-def]
            sizes = table.block_sizes(op, "tune")
            if made.batch.plans.get("sizes") != sizes:
                made.batch.plans.clear()
                made.batch.plans["sizes"] = sizes
            return attention.on("triton")(q, kv, made.batch, made.shape, None)

        yield f"d{dim}_g4_b2", [call]


def linear_shapes(op: str, *, tiny: bool, copies: int | None = None) -> Iterator[Shape]:
    """A product that is torch's on this GPU has sizes only of ``few``."""
    rows = (3 if tiny else 8) if op.endswith(("few", "small")) else 40 if tiny else 512
    formats = [WeightFormat("int4", 32 if tiny else 128), WeightFormat("int8")]
    if op.endswith("few"):
        formats = [FEW[op]]
    elif op.startswith("fp8"):
        formats = [WeightFormat("fp8", 128), WeightFormat("fp8")]
    for (out, size), format in product(((48, 2 * (formats[0].group or 32)),) if tiny else SHAPES, formats):
        cold = 1 if tiny or rows > 64 else max(2, min(16, COLD_BYTES // format.num_bytes(out, size, 2)))
        matrices = [random_matrix(out, size, format, "triton") for _ in range(copies or cold)]
        if op.startswith("fp8_linear") and format.group is None and multiplies(matrices[0]):
            continue
        x = torch.randn(rows, size, device=DEVICE).bfloat16()
        key = f"n{out}_k{size}"
        if not op.endswith("few"):
            key = (f"g{format.group or 0}_" if op.startswith("fp8") else f"{format.kind}_") + key
        yield key, [lambda x=x, packed=packed: linear(x, packed) for packed in matrices]  # type: ignore[misc]


def shapes_of(op: str, *, tiny: bool, copies: int | None = None) -> Iterator[Shape]:
    if op == "attention_decode":
        return attention_shapes(op, ((1, 40),) if tiny else ((1, 4096),) * 64, tiny=tiny)
    if op == "attention_prefill":
        return attention_shapes(op, ((30, 40),) if tiny else ((2048, 2048),) * 4, tiny=tiny)
    return linear_shapes(op, tiny=tiny, copies=copies)


def choices(op: str, *, tiny: bool) -> list[dict[str, int]]:
    names, options = list(CHOICES[op]), list(CHOICES[op].values())
    tried = [dict(zip(names, sizes, strict=True)) for sizes in product(*options)][: 2 if tiny else None]
    return [table.DEFAULTS[op], *(sizes for sizes in tried if sizes != table.DEFAULTS[op])]


def timings(op: str, calls: Calls, *, tiny: bool) -> list[float]:
    """Return the seconds of ``calls`` with each of `choices`, which are put into the table in memory one by one."""
    found = []
    for sizes in choices(op, tiny=tiny):
        table.sizes_table(table.gpu_name())[op] = {"all": sizes}
        try:
            found.append(seconds(calls))
        except OutOfResources:
            found.append(float("inf"))
    print(f"  {op}: defaults {found[0] * 1e6:.1f} us, best {min(found) * 1e6:.1f} us", flush=True)
    return found


def tune(op: str, *, tiny: bool) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield each shape of ``op`` with the sizes that were fastest.

    Up to 16 rows a last one, "all", has those that came closest to the fastest over the shapes, for other matrices.
    """
    tried, ratios = choices(op, tiny=tiny), [0.0] * len(choices(op, tiny=tiny))
    for shape, calls in shapes_of(op, tiny=tiny):
        taken = timings(op, calls, tiny=tiny)
        ratios = [ratio + each / min(taken) for ratio, each in zip(ratios, taken, strict=True)]
        yield shape, with_flashinfer(op, calls, tried[taken.index(min(taken))])
    if op in FEW:
        yield "all", tried[ratios.index(min(ratios))]


def compile_choices(ops: list[str], part: int, parts: int, *, tiny: bool) -> None:
    """Call every ``parts``-th choice once: what it compiles lies in Triton's cache then."""
    number = count()
    for op in ops:
        for _, calls in shapes_of(op, tiny=tiny, copies=1):
            for sizes in choices(op, tiny=tiny):
                if next(number) % parts != part:
                    continue
                table.sizes_table(table.gpu_name())[op] = {"all": sizes}
                with contextlib.suppress(OutOfResources):
                    calls[0]()


def with_flashinfer(op: str, calls: Calls, sizes: dict[str, int]) -> dict[str, int]:
    """``sizes``, and "flashinfer" beside them where it is there, gives our result and takes less time."""
    if op != "attention_prefill" or importlib.util.find_spec("flashinfer") is None:
        return sizes
    tables, both = table.sizes_table(table.gpu_name()), {**sizes, "flashinfer": 1}
    tables[op] = {"all": sizes}
    ours, ours_s = calls[0](), seconds(calls)
    tables[op] = {"all": both}
    try:
        theirs, theirs_s = calls[0](), seconds(calls)
    except Exception as error:  # whatever another version of it does not take
        print("FlashInfer is passed over:", error)
        return sizes
    assert isinstance(ours, torch.Tensor)
    assert isinstance(theirs, torch.Tensor)
    difference = float((ours.float() - theirs.float()).abs().max())
    print(
        f"FlashInfer {theirs_s * 1e6:.1f} us, Quire {ours_s * 1e6:.1f} us, largest difference {difference:.4f}"
    )
    return both if difference <= 0.02 and theirs_s < ours_s else sizes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", nargs="+", choices=sorted(CHOICES), default=sorted(CHOICES))
    parser.add_argument("--out", type=Path, default=table.FOLDER, help="folder of the tables")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, for the interpreter")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile first")
    parser.add_argument("--part", type=int, help="compile this part of --jobs, and measure nothing")
    args = parser.parse_args()
    if not args.tiny and DEVICE.type == "cpu":
        parser.error("there is no GPU: nothing can be tuned")
    if args.part is not None:
        compile_choices(args.ops, args.part, args.jobs, tiny=args.tiny)
        return
    command = [sys.executable, "-m", "benchmarks.gpu.tune", *sys.argv[1:], "--part"]
    for child in [subprocess.Popen([*command, str(part)]) for part in range(args.jobs)]:
        child.wait()
    path = args.out / f"{table.gpu_name()}.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    for op in args.ops:
        for shape, sizes in tune(op, tiny=args.tiny):
            found.setdefault(op, {})[shape] = sizes
            print(op, shape, sizes, flush=True)
            args.out.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(path)


if __name__ == "__main__":
    main()
