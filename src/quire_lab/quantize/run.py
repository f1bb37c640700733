"""`quire quantize`: layer by layer from the source's files into the folder that is written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire import __version__
from quire.clock import Clock, WallClock
from quire.errors import ConfigError, ModelLoadError
from quire.models.hub import locate
from quire.models.stored_weights import view
from quire_lab.bench.page import finite
from quire_lab.bench.progress import ticking
from quire_lab.quantize.args import QuantizeArgs
from quire_lab.quantize.folder import OutFolder
from quire_lab.quantize.layouts import compressed_tensors, compressed_tensors_config
from quire_lab.quantize.report import print_report, summary
from quire_lab.quantize.rounding import Rounded, round_to_nearest
from quire_lab.quantize.scheme import KINDS, Plan, Scheme, default_group, plan
from quire_lab.quantize.source import Matrix, Source, read_source


@dataclass(slots=True)
class Progress:
    """How far a run is, for the line that it prints now and then."""

    total: int
    done: int = 0
    skipped: int = 0

    def line(self, seconds: float) -> str:
        now = self.done - self.skipped
        left = f", about {seconds / now * (self.total - self.done):.0f} s left" if now > 0 else ""
        return f"quire quantize: {self.done} of {self.total} layers after {seconds:.0f} s{left}"


def run(model: str, args: QuantizeArgs) -> int:
    """Quantize and print the report. Raises as `quantize`."""
    report = quantize(model, args, WallClock())
    if args.json:
        print(json.dumps(finite(report), indent=1))
    else:
        print_report(report)
    return 0


def quantize(model: str, args: QuantizeArgs, clock: Clock) -> dict[str, Any]:
    """Write the folder ``args.out`` and return the report.

    Raises:
        ConfigError: a flag is wrong, the model is quantized already, or the disk is full.
        ModelLoadError: the model cannot be read, or a weight is not a finite number.
    """
    if args.out is None:
        raise ConfigError("out is missing: give --out DIR, a folder that does not exist yet")
    begin_s = clock.now()
    source = read_source(locate(model, revision=args.revision))
    made = plan(source.matrices, wanted_scheme(args, source), args.keep)
    folder = OutFolder(Path(args.out).expanduser(), _identity(args, source), source.num_layers + 1)
    progress = Progress(source.num_layers)
    entries: list[dict[str, Any]] = []
    with ticking(progress.line):
        for layer in range(source.num_layers):
            noted = folder.entries(layer)
            if noted is None:
                noted = _quantize_layer(source, layer, made, folder)
            else:
                progress.skipped += 1
            entries += noted
            progress.done += 1
        last = source.num_layers
        if folder.entries(last) is None:
            folder.add(last, {name: view(source.tensors[name]) for name in source.layer_tensors(None)}, [])
    config = {**source.config, "quantization_config": quantization_config(source, made.schemes)}
    report = summary(model, args, source, made, entries, clock.now() - begin_s)
    folder.finish(source.folder, config, report)
    return report


def wanted_scheme(args: QuantizeArgs, source: Source) -> Scheme:
    """Return the scheme that the flags ask for. Raises `ConfigError` for one that the format cannot hold."""
    bits = min(KINDS) if args.bits is None else args.bits
    if bits not in KINDS:
        raise ConfigError(f"bits = {bits}: {args.format} is written with {' or '.join(map(str, KINDS))} bits")
    group = args.group_size
    if group is None:
        group = default_group(source.checkpoint.spec.hidden_size)
    return Scheme(bits, None if group == 0 else group, args.symmetric)


def quantization_config(source: Source, schemes: Mapping[str, Scheme | None]) -> dict[str, Any]:
    """Return the ``quantization_config`` of what is written."""
    matrices = [
        name.removesuffix(".weight")
        for name, tensor in source.tensors.items()
        if name.endswith(".weight") and len(tensor.shape) == 2
    ]
    plain = [name for name in matrices if schemes.get(name) is None]
    return compressed_tensors_config(schemes, sorted({*plain, "lm_head"}))


def _quantize_layer(source: Source, layer: int, made: Plan, folder: OutFolder) -> list[dict[str, Any]]:
    """Write the shard of ``layer`` and return what the report says of its matrices."""
    matrices = [m for m in source.matrices if m.layer == layer and made.schemes[m.name] is not None]
    names = {matrix.tensor for matrix in matrices}
    tensors = {n: view(source.tensors[n]) for n in source.layer_tensors(layer) if n not in names}
    entries = []
    for matrix in matrices:
        scheme = made.schemes[matrix.name]
        assert scheme is not None
        weight = read_weight(source, matrix)
        rounded = round_to_nearest(weight, scheme)
        parts = compressed_tensors(rounded)
        tensors |= {f"{matrix.name}.{suffix}": tensor for suffix, tensor in parts.items()}
        entries.append(entry(matrix, rounded, weight, parts.values()))
    folder.add(layer, tensors, entries)
    for name in source.layer_tensors(layer):
        source.tensors[name].unmap_pages()
    return entries


def read_weight(source: Source, matrix: Matrix) -> Tensor:
    """Return a matrix as fp32. Raises `ModelLoadError` for a number that is not finite."""
    weight = view(source.tensors[matrix.tensor]).float()
    if not torch.isfinite(weight).all():
        raise ModelLoadError(
            f"{source.tensors[matrix.tensor].file}: {matrix.tensor} has a number that is not finite; download the file "
            "again, or take another model"
        )
    return weight


def entry(matrix: Matrix, rounded: Rounded, weight: Tensor, parts: Any) -> dict[str, Any]:
    """Return what the report says of one matrix: its scheme, bytes, and square error over its square."""
    size = weight.square().sum().item()
    error = (rounded.expand() - weight).square().sum().item()
    return {
        "layer": matrix.layer, "name": matrix.name, "scheme": str(rounded.scheme), "num_weights": weight.numel(),
        "bytes": sum(part.nbytes for part in parts), "weight_error": error / size if size else 0.0,
    }  # fmt: skip


def _identity(args: QuantizeArgs, source: Source) -> dict[str, Any]:
    """Return what a run must have in common with the one that it goes on with."""
    files: Sequence[Path] = source.checkpoint.files
    stats = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}
    settings = asdict(replace(args, json=False, out=None))
    return {"version": __version__, "args": settings | {"keep": list(args.keep)}, "files": stats}
