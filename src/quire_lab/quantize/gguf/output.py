"""One GGUF file from the shards of a run: what is checked before the run, and how its tensors are put in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.models.checkpoint import read_tokenizer
from quire.models.safetensors_file import StoredTensor
from quire.models.stored_weights import view
from quire_lab.quantize.args import QuantizeArgs
from quire_lab.quantize.folder import OutFolder
from quire_lab.quantize.gguf.container import TensorInfo, write_file
from quire_lab.quantize.gguf.grids import SCHEMES
from quire_lab.quantize.gguf.imatrix import read_imatrix
from quire_lab.quantize.gguf.metadata import ROPE_FREQS, architecture, check_keys, model_keys, rope_factors
from quire_lab.quantize.gguf.tensors import (
    FILE_TYPES,
    MIXES,
    OF_BITS,
    Target,
    gguf_plan,
    table_schemes,
    targets,
)
from quire_lab.quantize.gguf.vocabulary import vocabulary
from quire_lab.quantize.scheme import Plan
from quire_lab.quantize.source import Source


@dataclass(frozen=True, slots=True)
class GgufOutput:
    """A file that is to be written: its keys and tensors, and the types of the matrices that they are made from.

    ``factors``: see `rope_factors`.
    """

    name: str
    metadata: Mapping[str, Any]
    targets: tuple[Target, ...]
    plan: Plan
    factors: Tensor | None

    def write(self, folder: OutFolder) -> int:
        """Write the file from the shards of ``folder``; return its bytes. Raises `ConfigError` for a full disk."""
        stored = folder.stored()
        infos = [_info(target, stored) for target in self.targets]
        if self.factors is not None:
            infos.append(TensorInfo(ROPE_FREQS, "float32", tuple(self.factors.shape)))
        path = folder.result / self.name
        try:
            path.parent.mkdir(exist_ok=True)
            write_file(path, self.metadata, infos, self._parts(stored))
            return path.stat().st_size
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error}; what is whole stays in {folder.path}, and the same command goes "
                "on from there"
            ) from None

    def _parts(self, stored: Mapping[str, StoredTensor]) -> Iterator[tuple[str, memoryview]]:
        for target in self.targets:
            for name in target.stored:
                _, tensor = _find(name, stored)
                yield target.name, _bytes(_rows(target, view(tensor)))
        if self.factors is not None:
            yield ROPE_FREQS, _bytes(self.factors)


def prepare(source: Source, args: QuantizeArgs) -> GgufOutput:
    """Return what is to be written.

    Raises:
        ConfigError: a flag does not fit.
        UnsupportedModelError: GGUF, or its readers, have no such model or tokenizer.
    """
    spec, where = source.checkpoint.spec, str(source.folder)
    gguf_type = _type_of(args)
    arch = architecture(spec, where)
    keys = model_keys(spec, arch, source.folder.name) | {"general.file_type": FILE_TYPES[gguf_type]}
    keys |= vocabulary(read_tokenizer(source.folder), spec.vocab_size, spec.eos_token_ids, where)
    chosen, factors = targets(source, keys), rope_factors(spec)
    names = [target.name for target in chosen] + ([] if factors is None else [ROPE_FREQS])
    check_keys(spec, keys, names, factors, where)
    plan = gguf_plan(source, gguf_type, args.keep)
    for target in chosen:
        kinds = {plan.schemes.get(name.removesuffix(".weight")) for name in target.stored}
        if len(kinds) > 1:
            raise ConfigError(f"keep: {target.name} holds the matrices of all experts, which have one type")
    plan = replace(plan, tables=table_schemes(source, gguf_type))
    if args.imatrix is not None:
        plan = _with_importance(plan, source, chosen, Path(args.imatrix).expanduser())
    return GgufOutput(f"{source.folder.name}-{gguf_type.upper()}.gguf", keys, chosen, plan, factors)


def _with_importance(plan: Plan, source: Source, chosen: tuple[Target, ...], path: Path) -> Plan:
    """Return the plan with what the file at ``path`` says of the inputs of its matrices."""
    values = read_imatrix(path)
    inputs = {
        matrix.name: matrix.in_features for matrix in source.matrices if plan.schemes[matrix.name] is not None
    }
    importance: dict[str, list[float]] = {}
    missing = []
    for target in chosen:
        names = [name.removesuffix(".weight") for name in target.stored]
        if names[0] not in inputs:
            continue
        if target.name not in values:
            missing.append(target.name)
            continue
        rows = values[target.name]
        if len(rows) != len(names) * inputs[names[0]]:
            raise ConfigError(
                f"imatrix: {path}: {target.name} has {len(rows)} values, and the model {len(names)} matrices of "
                f"{inputs[names[0]]} inputs: it is of another model"
            )
        importance |= zip(names, rows.view(len(names), -1).tolist(), strict=True)
    if not importance:
        raise ConfigError(
            f"imatrix: {path} has none of this model's matrices, the first of which is {missing[0]}"
        )
    lines = (f"{len(missing)} matrices are not in {path.name}, for example {missing[0]}",) if missing else ()
    return replace(plan, importance=importance, remarks=(*plan.remarks, *lines))


def _type_of(args: QuantizeArgs) -> str:
    if args.bits is not None and args.gguf_type is not None:
        raise ConfigError(
            f"bits = {args.bits} and gguf_type = {args.gguf_type!r} say the same thing; give one of them"
        )
    bits = 4 if args.bits is None else args.bits
    if bits not in OF_BITS:
        raise ConfigError(f"bits = {bits}: gguf is written with {', '.join(map(str, OF_BITS))} bits")
    for flag in ("group_size", "symmetric"):
        if getattr(args, flag) is not None:
            raise ConfigError(
                f"{flag}: the types of gguf have groups and offsets of their own; take --gguf-type"
            )
    if args.activations or args.method in ("smoothquant", "fp8", "nf4"):
        raise ConfigError("gguf has no types for nf4, fp8 or activations; take --format compressed-tensors")
    assert args.gguf_type is None or args.gguf_type in MIXES
    return args.gguf_type or OF_BITS[bits]


def _find(name: str, stored: Mapping[str, StoredTensor]) -> tuple[str | None, StoredTensor]:
    """Return the type of blocks and the rows of the tensor ``name``; None where it is plain."""
    if name in stored:
        return None, stored[name]
    base = name.removesuffix(".weight")
    block = next(kind for kind in SCHEMES if f"{base}.{kind}" in stored)
    return block, stored[f"{base}.{block}"]


def _info(target: Target, stored: Mapping[str, StoredTensor]) -> TensorInfo:
    block, tensor = _find(target.stored[0], stored)
    return TensorInfo(target.name, block or ("float32" if _as_fp32(target) else tensor.dtype), target.shape)


def _as_fp32(target: Target) -> bool:
    """Vectors and routers, which llama.cpp multiplies in fp32."""
    return len(target.shape) == 1 or "ffn_gate_inp" in target.name


def _rows(target: Target, rows: Tensor) -> Tensor:
    if rows.dtype != torch.uint8 and _as_fp32(target):
        rows = rows.float() + float(target.plus_one)
    if target.pairwise_heads:
        order = torch.arange(len(rows)).view(target.pairwise_heads, 2, -1).transpose(1, 2).flatten()
        rows = rows[order]
    return rows


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
