"""What a run says of its result: errors by layer, bytes with everything counted, minutes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from quire.args import EngineArgs
from quire.clock import Clock
from quire.device import detect_device
from quire.errors import ConfigError
from quire_lab.bench.page import console
from quire_lab.eval.args import EvalArgs
from quire_lab.eval.run import evaluate
from quire_lab.quantize.args import QuantizeArgs
from quire_lab.quantize.scheme import Plan
from quire_lab.quantize.source import Source


def summary(
    model: str, args: QuantizeArgs, given: Source, source: Source, made: Plan, entries: Sequence[Mapping[str, Any]],
    seconds: float, num_bytes: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the report: what ``--json`` prints and the folder keeps.

    ``given``: what is to be quantized; ``source``: the same, rotated where the flags say so.
    ``num_bytes``: of the file, where it is one; None: what the matrices and all other tensors have.
    """
    matrices = {matrix.tensor for matrix in source.matrices if made.schemes[matrix.name] is not None}
    plain = {name: tensor for name, tensor in source.tensors.items() if name not in matrices}
    quantized = sum(entry["bytes"] for entry in entries)
    num_weights = sum(entry["num_weights"] for entry in entries)
    unrounded = [m.name for m in source.matrices if made.schemes[m.name] is None]
    num_params = given.checkpoint.spec.num_params
    total = quantized + sum(tensor.num_bytes for tensor in plain.values()) if num_bytes is None else num_bytes
    return {
        "model": model, "args": {**asdict(args), "keep": list(args.keep)}, "out": args.out,
        "seconds": seconds, "bytes": total, "bytes_source": sum(t.num_bytes for t in given.tensors.values()),
        "bits_per_weight": 8 * total / num_params, "bits_per_quantized_weight": 8 * quantized / max(1, num_weights),
        "remarks": [*source.remarks, *made.remarks, *(f"{name} stays as it is" for name in unrounded)],
        "layers": [_of_layer(layer, entries) for layer in range(source.num_layers)], "matrices": list(entries),
    }  # fmt: skip


def fidelity(made: Path, source: Path, args: QuantizeArgs, clock: Clock) -> dict[str, Any]:
    """Return what `quire eval` measures of the folder ``made``, beside its source in fp32.

    Raises:
        ConfigError: the mean KL is above ``args.max_kl``.
    """
    engine = EngineArgs(model=str(made), packed_cache="off")
    eval_args = EvalArgs(text=args.text, limit_tokens=args.limit_tokens, against=str(source))
    result = evaluate(engine, eval_args, detect_device(), clock)
    if args.max_kl is not None and not result["kl_mean"] <= args.max_kl:
        raise ConfigError(
            f"the mean KL is {result['kl_mean']:.4g} on {args.text}, and max_kl = {args.max_kl:g}: nothing is written; "
            f"what was made stays in {made} for a run with a larger one"
        )
    keys = (
        "text", "num_positions", "perplexity", "perplexity_original", "kl_mean", "kl_mean_se", "kl_median", "kl_p99",
        "kl_p999", "top1_agreement",
    )  # fmt: skip
    return {key: result[key] for key in keys}


def _of_layer(layer: int, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the largest errors among the matrices of ``layer``."""
    of_this = [entry for entry in entries if entry["layer"] == layer]
    worst: dict[str, Any] = {"layer": layer}
    for key in ("weight_error", "output_error"):
        values = [entry[key] for entry in of_this if entry.get(key) is not None]
        worst[key] = max(values) if values else None
    return worst


def print_report(report: Mapping[str, Any]) -> None:
    """Print the report as a table."""
    out = console()
    table = Table("layer", "matrix", "scheme", "error of weights", "error of outputs", box=None)
    for layer in report["layers"]:
        of_this = [entry for entry in report["matrices"] if entry["layer"] == layer["layer"]]
        worst = max(
            of_this, key=lambda entry: entry.get("output_error") or entry["weight_error"], default=None
        )
        if worst is not None:
            output = worst.get("output_error")
            table.add_row(
                str(layer["layer"]), worst["name"].rpartition("layers.")[2], worst["scheme"],
                f"{worst['weight_error']:.3g}", "–" if output is None else f"{output:.3g}",
            )  # fmt: skip
    out.print(
        "The matrix with the largest error of each layer; errors are shares of the square.", highlight=False
    )
    out.print(table)
    was, now = report["bytes_source"], report["bytes"]
    measured = report.get("fidelity")
    if measured is not None:
        out.print(
            f"KL from the source in fp32: {measured['kl_mean']:.4g} ± {measured['kl_mean_se']:.2g}, same top token "
            f"{measured['top1_agreement']:.2%}, perplexity {measured['perplexity']:.4g} instead of "
            f"{measured['perplexity_original']:.4g} ({measured['num_positions']:,} positions)",
            highlight=False,
        )
    for line in (
        *report["remarks"],
        f"{report['out']}: {now / 2**20:,.1f} MiB of {was / 2**20:,.1f}, {report['bits_per_weight']:.2f} bits per "
        f"weight with everything counted, {report['seconds'] / 60:.1f} minutes",
    ):
        out.print(line, highlight=False, markup=False)
