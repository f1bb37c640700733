"""`quire quantize`: layer by layer from the source's files into the folder that is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire import __version__
from quire.clock import Clock, WallClock
from quire.device import detect_device
from quire.errors import ConfigError, ModelLoadError
from quire.models.hub import locate
from quire.models.stored_weights import view
from quire_lab.bench.page import finite
from quire_lab.bench.progress import ticking
from quire_lab.quantize.args import CALIBRATED, QuantizeArgs
from quire_lab.quantize.calibrated import Calibration
from quire_lab.quantize.folder import OutFolder
from quire_lab.quantize.gguf.output import GgufOutput, prepare
from quire_lab.quantize.gptq import output_error
from quire_lab.quantize.grid import Rounded
from quire_lab.quantize.layouts import LAYOUTS, Layout
from quire_lab.quantize.methods import round_layer
from quire_lab.quantize.report import fidelity, print_report, summary
from quire_lab.quantize.rotate import check_rotation, rotated_source
from quire_lab.quantize.rounding import round_to_nearest
from quire_lab.quantize.scheme import Plan, Scheme, plan, wanted_scheme
from quire_lab.quantize.source import Matrix, Source, read_source
from quire_lab.quantize.work import LayerWork


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
        ConfigError: a flag is wrong, the model is quantized already, the disk is full, or the KL is too large.
        ModelLoadError: the model cannot be read, or a weight is not a finite number.
    """
    if args.out is None:
        raise ConfigError("out is missing: give --out DIR, a folder that does not exist yet")
    _check(args)
    begin_s = clock.now()
    given = source = read_source(locate(model, revision=args.revision))
    layout = LAYOUTS[args.format]
    gguf, made = _prepared(source, args, layout)
    if args.rotate:
        check_rotation(source)
    folder = OutFolder(
        Path(args.out).expanduser(), _identity(args, source), source.num_layers + 1, apart=gguf is not None
    )
    turned = folder.path / f"{given.folder.name}-rotated"
    if args.rotate:
        source = rotated_source(given, turned, args.keep)
        gguf, made = _prepared(source, args, layout)
    entries = _write_layers(source, args, made, layout, folder)
    if gguf is None:
        config = {**source.config, "quantization_config": _written_config(source, made, layout)}
        folder.complete(source.folder, config)
    num_bytes = None if gguf is None else gguf.write(folder)
    seconds = clock.now() - begin_s
    report = summary(model, args, given, source, made, entries, seconds, num_bytes)
    if args.text is not None:
        report["fidelity"] = fidelity(folder.result, given.folder, args, clock)
    if args.rotate:
        shutil.rmtree(turned)
    folder.finish(finite(report))
    return report


def _check(args: QuantizeArgs) -> None:
    """Raise `ConfigError` for flags that do not go together."""
    if args.max_kl is not None and args.text is None:
        raise ConfigError("max_kl needs text: give --text FILE, on which the KL is measured")
    if args.calib is not None and args.method not in CALIBRATED:
        raise ConfigError(
            f"calib: the method {args.method} runs the model on no text; those that do are {', '.join(CALIBRATED)}"
        )
    if args.imatrix is not None and (
        args.method != "imatrix" or args.format != "gguf" or args.calib is not None
    ):
        raise ConfigError(
            "imatrix needs method = 'imatrix' and format = 'gguf', and no calib, whose place it takes"
        )
    if args.gguf_type is not None and args.format != "gguf":
        raise ConfigError(f"gguf_type = {args.gguf_type!r} needs format = 'gguf', which is {args.format!r}")


def _prepared(source: Source, args: QuantizeArgs, layout: Layout) -> tuple[GgufOutput | None, Plan]:
    """Return the GGUF file that is to be written, if it is one, and the scheme of each matrix."""
    if args.format == "gguf":
        gguf = prepare(source, args)
        return gguf, gguf.plan
    wanted = wanted_scheme(args, source.checkpoint.spec.hidden_size)
    return None, plan(source.matrices, wanted, args.keep, mixes=layout.mixes)


def _write_layers(
    source: Source, args: QuantizeArgs, made: Plan, layout: Layout, folder: OutFolder
) -> list[dict[str, Any]]:
    """Write every shard that is missing; return what the report says of all matrices."""
    entries: list[dict[str, Any]] = []
    progress = Progress(source.num_layers)
    calibration: Calibration | None = None
    with ticking(progress.line):
        for layer in range(source.num_layers):
            noted = folder.entries(layer)
            if noted is None:
                if args.method in CALIBRATED and args.imatrix is None and calibration is None:
                    calibration = Calibration(source, args, detect_device())
                    if layer:
                        calibration.go_on(folder, layer)
                noted = _write_layer(source, layer, args.method, made, layout, folder, calibration)
            else:
                progress.skipped += 1
            entries += noted
            progress.done += 1
    last = source.num_layers
    if folder.entries(last) is None:
        folder.add(last, _outside_layers(source, layout, made.tables), [])
    return entries


def _outside_layers(source: Source, layout: Layout, tables: Mapping[str, Scheme]) -> dict[str, Tensor]:
    """Return what the last shard has: embeddings, the output matrix and the last norm.

    ``tables``: schemes of its matrices, which are rounded without text.
    """
    tensors = {name: view(source.tensors[name]) for name in source.layer_tensors(None)}
    for name, scheme in tables.items():
        parts = layout.parts(round_to_nearest(_finite(source, name), scheme))
        tensors |= {f"{name.removesuffix('.weight')}.{suffix}": part for suffix, part in parts.items()}
        del tensors[name]
    return tensors


def _write_layer(
    source: Source, layer: int, method: str, made: Plan, layout: Layout, folder: OutFolder,
    calibration: Calibration | None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Write the shard of ``layer`` and return what the report says of its matrices."""
    work = _layer_work(source, layer, made, calibration)
    with torch.inference_mode():
        results = round_layer(method, work)
    if calibration is not None:
        calibration.hand_on(folder, layer, work, results)
    names = {m.tensor for m in work.matrices if m.name in results}
    tensors = {n: view(source.tensors[n]) for n in source.layer_tensors(layer) if n not in names}
    for canonical in work.changed:
        tensors[source.takes[f"layers.{layer}.{canonical}"][0]] = work.plain[canonical]
    entries = []
    for matrix in work.matrices:
        if matrix.name in results:
            parts = layout.parts(results[matrix.name])
            tensors |= {f"{matrix.name}.{suffix}": tensor for suffix, tensor in parts.items()}
            entries.append(entry(work, matrix, results[matrix.name], sum(p.nbytes for p in parts.values())))
    folder.add(layer, tensors, entries)
    folder.drop_states(layer + 1)
    for name in source.layer_tensors(layer):
        source.tensors[name].unmap_pages()
    return entries


def _layer_work(source: Source, layer: int, made: Plan, calibration: Calibration | None) -> LayerWork:
    matrices = tuple(m for m in source.matrices if m.layer == layer)
    tensors = {matrix.tensor for matrix in matrices}
    prefix = f"layers.{layer}."
    plain = {
        canonical.removeprefix(prefix): view(source.tensors[name])
        for canonical, (name, _) in source.takes.items()
        if canonical.startswith(prefix) and name not in tensors
    }
    spec = source.checkpoint.spec
    return LayerWork(
        spec.layers[layer], matrices, made.schemes, {m.name: read_weight(source, m) for m in matrices}, plain,
        {} if calibration is None else calibration.stats(layer), spec.norm_plus_one,
        importance={m.name: torch.tensor(made.importance[m.name]) for m in matrices if m.name in made.importance},
    )  # fmt: skip


def read_weight(source: Source, matrix: Matrix) -> Tensor:
    """Return a matrix as fp32. Raises `ModelLoadError` for a number that is not finite."""
    return _finite(source, matrix.tensor)


def _finite(source: Source, name: str) -> Tensor:
    weight = view(source.tensors[name]).float()
    if not torch.isfinite(weight).all():
        raise ModelLoadError(
            f"{source.tensors[name].file}: {name} has a number that is not finite; download the file "
            "again, or take another model"
        )
    return weight


def entry(work: LayerWork, matrix: Matrix, rounded: Rounded, num_bytes: int) -> dict[str, Any]:
    """Return what the report says of one matrix: scheme, bytes, and square errors as shares of the squares."""
    weight, gram = work.weights[matrix.name], work.gram(matrix)
    expanded = rounded.expand()
    size = weight.square().sum().item()
    error = (expanded - weight).square().sum().item()
    return {
        "layer": matrix.layer, "name": matrix.name, "scheme": str(rounded.scheme), "num_weights": weight.numel(),
        "bytes": num_bytes, "weight_error": error / size if size else 0.0,
        "output_error": None if gram is None else output_error(weight, expanded, gram),
    }  # fmt: skip


def _written_config(source: Source, made: Plan, layout: Layout) -> dict[str, Any]:
    """Return the ``quantization_config`` of what is written."""
    matrices = [
        name.removesuffix(".weight")
        for name, tensor in source.tensors.items()
        if name.endswith(".weight") and len(tensor.shape) == 2
    ]
    plain = [name for name in matrices if made.schemes.get(name) is None]
    return layout.config(made.schemes, sorted({*plain, "lm_head"}))


def _identity(args: QuantizeArgs, source: Source) -> Mapping[str, Any]:
    """Return what a run must have in common with the one that it goes on with."""
    texts = [Path(path).expanduser() for path in (args.calib, args.imatrix) if path is not None]
    files = [*source.checkpoint.files, *texts]
    stats = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files if path.exists()}
    same = replace(args, json=False, out=None, text=None, limit_tokens=None, max_kl=None)
    return {"version": __version__, "args": asdict(same) | {"keep": list(args.keep)}, "files": stats}
