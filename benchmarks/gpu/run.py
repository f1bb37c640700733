"""Run one part and write one JSON; render all of them to Markdown.

    python -m benchmarks.gpu.run decode-attention          # → benchmarks/results/gpu/decode-attention.json
    python -m benchmarks.gpu.run all --tiny                # every part at toy sizes, in the interpreter on a CPU
    python -m benchmarks.gpu.run render                    # → benchmarks/results/gpu-NAME.md

Needs torch, Triton and this tree on PYTHONPATH (``src`` and the root); no installation, no network.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
PARTS = (  # in order of value; each within eight minutes on an H200 as planned, none measured yet
    "decode-attention", "w4a16", "norm", "end-to-end", "prefill-attention", "throughput", "invariant", "mixture",
    "adapters", "sampling",
)  # fmt: skip


def part(name: str) -> Callable[..., list[dict[str, Any]]]:
    from benchmarks.gpu import engine, kernels, rows

    return {
        "decode-attention": kernels.decode_attention,
        "w4a16": kernels.linears,
        "norm": kernels.norms,
        "end-to-end": engine.end_to_end,
        "prefill-attention": kernels.prefill_attention,
        "throughput": engine.throughput,
        "invariant": engine.invariant,
        "mixture": engine.mixture,
        "adapters": rows.adapters,
        "sampling": rows.samples,
    }[name]


def machine() -> dict[str, Any]:
    import torch
    import triton

    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if cuda else "none: Triton's interpreter on a CPU",
        "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda,
        "python": platform.python_version(), "commit": commit(), "utc": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
    }  # fmt: skip


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def run(name: str, out: Path, *, tiny: bool) -> None:
    from benchmarks.gpu.timing import ceilings

    import quire.kernels.triton_ops  # noqa: F401  registers

    start_s = time.perf_counter()
    limits = ceilings(tiny=tiny)
    rows = part(name)(limits, tiny=tiny)
    found = {"part": name, "tiny": tiny, "machine": machine(), "ceilings": limits, "rows": rows}
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{path}: {len(rows)} rows, {time.perf_counter() - start_s:.0f} s")


def render(folder: Path, out: Path) -> None:
    """One table a part; a file for each GPU. What was tried in the interpreter is no measurement, and left out."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    measured = [each for each in found if not each["tiny"]]
    if not measured:
        print("nothing measured: every result is from the interpreter")
        return
    for gpu in sorted({each["machine"]["gpu"] for each in measured}):
        lines = [f"# {gpu}", ""]
        for each in (each for each in measured if each["machine"]["gpu"] == gpu):
            lines += [f"## {each['part']}", "", f"{each['machine']}", "", f"Ceilings: {each['ceilings']}", ""]
            names = list(dict.fromkeys(key for row in each["rows"] for key in row))
            lines += ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
            lines += ["| " + " | ".join(show(row.get(name)) for name in names) + " |" for row in each["rows"]]
            lines.append("")
        path = out / f"gpu-{gpu.lower().replace(' ', '-')}.md"
        path.write_text("\n".join(lines))
        print(path)


def show(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=(*PARTS, "all", "render"))
    parser.add_argument(
        "--tiny", action="store_true", help="toy sizes, for the interpreter (TRITON_INTERPRET=1)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu", help="folder of the JSON files")
    args = parser.parse_args()
    if args.part == "render":
        render(args.out, RESULTS)
        return
    import torch

    if not args.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU: nothing can be measured; TRITON_INTERPRET=1 … --tiny tries the script")
    for name in PARTS if args.part == "all" else (args.part,):
        run(name, args.out, tiny=args.tiny)


if __name__ == "__main__":
    main()
