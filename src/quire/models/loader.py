"""Weights of a checkpoint under their canonical names, one after another: safetensors, GGUF, or random.

Names, shapes and types are checked before the first is used (`weight_sources`). Where the type needs no change, tensors
are views of the mapped file: no second copy, and unread parts of the file take no memory. A weight that is stored
quantized and held so comes as a matrix that decodes rows on demand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from quire.config import ModelConfig
from quire.errors import ModelLoadError
from quire.families import Take
from quire.kernels.workspace import mapped
from quire.models.checkpoint import stored_sources
from quire.models.safetensors_file import StoredTensor
from quire.models.stored_weights import joined_halves, open_quantized, unpermute, view
from quire.models.weight_sources import Source
from quire.modelspec import ModelSpec, weight_shapes
from quire.parallel.shard import Cut, uncut
from quire.quant.stored import Weight
from quire.weight_format import PLAIN, WeightFormat

_CPU = torch.device("cpu")
Cuts = Mapping[str, Cut]


def iter_weights(
    model: ModelConfig, dtype: torch.dtype, device: torch.device = _CPU, *, cuts: Cuts | None = None,
    without: Collection[str] = (),
) -> Iterator[tuple[str, Weight]]:  # fmt: skip
    """Yield (canonical name, weight) in the order of `weight_shapes`: a tensor of ``dtype`` (``correction_bias`` in
    float32), or a quantized matrix where ``model.formats`` says that it is held as it is stored.

    ``device`` is where random weights are made; a checkpoint's weights lie in the host's memory. ``cuts``: what a rank
    reads (`parallel.shard`), by its own names; None reads the whole model. Those ``without`` are left out.
    Tensors may be views of the mapped checkpoint: replace them, do not write into them.
    Raises `ModelLoadError` for a file, name or shape that is wrong, saying which.
    """
    if model.load_format == "random":
        return random_weights(model.spec, model.seed, dtype, device, cuts)
    stored, sources = stored_sources(Path(model.path), model.spec)
    shapes = weight_shapes(model.spec)
    cuts = {name: cut for name, cut in (cuts or uncut(shapes)).items() if name not in without}
    return iter_mapped(model.path, shapes, model.formats, stored, sources, dtype, cuts)


def iter_mapped(
    path: str, shapes: Mapping[str, tuple[int, ...]], formats: Mapping[str, WeightFormat],
    stored: Mapping[str, StoredTensor], sources: Mapping[str, Source], dtype: torch.dtype, cuts: Cuts | None = None,
) -> Iterator[tuple[str, Weight]]:  # fmt: skip
    """Yield the weights of ``shapes``, or what ``cuts`` takes of them, from the mapped files, as `iter_weights`."""
    for local, cut in (cuts or uncut(shapes)).items():
        canonical, shape = cut.name, cut.shape(shapes[cut.name])
        source = sources[canonical]
        weight = _weight(formats, cut, source, stored, stored_dtype(canonical, dtype))
        if tuple(weight.shape) != shape:
            raise ModelLoadError(
                f"{path}: {source.take.names[0]} gives {canonical} the shape {list(weight.shape)}, and the "
                f"configuration asks for {list(shape)}; config.json and weights do not belong together."
            )
        yield local, weight
        # The consumer has copied or packed the weight: drop its pages, so that memory never holds the model twice.
        for name in (*source.take.names, *(name for parts in source.parts for name in parts.values())):
            if name in stored:
                stored[name].unmap_pages()


def _weight(
    formats: Mapping[str, WeightFormat],
    cut: Cut,
    source: Source,
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype,
) -> Weight:
    """Return a weight as ``formats`` says; one that will be quantized on load comes plain."""
    if not source.held.quantized:
        return _assemble(source.take, stored, dtype, cut)
    matrix = open_quantized(source, stored, cut)
    wanted = formats.get(cut.name, PLAIN)
    if wanted.quantized and wanted in (source.held, source.held.wide):
        return matrix
    assert not wanted.quantized or source.held.kind == "fp8", (cut.name, wanted, source.held)
    return matrix.expand(dtype)


def _assemble(take: Take, stored: Mapping[str, StoredTensor], dtype: torch.dtype, cut: Cut) -> Tensor:
    """Apply the steps of a `Take`, in the order that its docstring gives, to the part that ``cut`` names."""
    if not take.names:
        return torch.zeros(cut.shape(take.shape), dtype=dtype)
    taken: list[slice] = [slice(None)] * (take.dim + 1)
    taken[take.dim] = slice(take.start, take.stop, take.step)
    if take.encoding == "halves":
        return joined_halves(take, stored)[_index(cut.ranges(2))].to(dtype).contiguous()
    if take.stacked:
        names = take.names if cut.experts is None else take.names[cut.experts.start : cut.experts.stop]
        views = [view(stored[name]) for name in names]
        if take.transpose:
            views = [part.transpose(-1, -2) for part in views]
        assert take.stop is None, take
        first = views[0][_index(cut.ranges(views[0].dim() + 1)[1:])]
        # Mapped, so that it is given back: freed chunks of this size fragment the heap, by 8 MiB per layer of experts.
        tensor = mapped(len(views), *first.shape, dtype=dtype)
        for target, part in zip(tensor, views, strict=True):
            target.copy_(part[_index(cut.ranges(part.dim() + 1)[1:])])
        return tensor
    tensor = view(stored[take.names[0]])
    if take.transpose:
        tensor = tensor.transpose(-1, -2)
    if take.encoding == "taps":
        tensor = tensor.squeeze(1)
    if take.encoding == "flat":
        tensor = tensor.flatten()
    if take.encoding == "rate":
        tensor = -torch.exp(tensor.float().flatten())
    if take.stop is not None or take.start or take.step != 1:
        tensor = tensor[tuple(taken)]
    if take.pieces:
        tensor = torch.cat(
            [tensor.narrow(take.dim, piece.start, len(piece)) for piece in take.pieces], take.dim
        )
    heads = take.unpermute_heads
    if heads and cut.rows is not None:  # whole heads
        heads = heads * len(cut.rows) // tensor.shape[0]
    tensor = tensor[_index(cut.ranges(tensor.dim()))]
    if heads:
        tensor = unpermute(tensor, heads)
    return tensor.to(dtype).contiguous()


def _index(parts: Iterable[range | None]) -> tuple[slice, ...]:
    return tuple(slice(None) if part is None else slice(part.start, part.stop) for part in parts)


# Random weights: norms are 1, all others normal. Generating every number would take ten seconds for a billion, so each
# tensor is cut from an endless repetition of `POOL` random numbers, at a place that its name, its shape and the seed
# decide. `POOL` is prime, so no two rows of a matrix are equal.
STD = 0.02
POOL = 4_194_301
# Norms of recurrent layers have no 1 added, in no family.
_ONES = (".delta.norm.weight", ".kda.norm.weight", ".mamba.norm.weight")
# Negative, so that a state decays: −0.8 on average.
_RATES = (".delta.rate", ".kda.rate", ".mamba.rate")
_WIDE = ("correction_bias", ".expert_scale", ".rate", ".dt_bias", ".skip")


def random_weights(
    spec: ModelSpec, seed: int, dtype: torch.dtype, device: torch.device = _CPU, cuts: Cuts | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (canonical name, tensor) in the order of `weight_shapes`: the same numbers on every device and rank."""
    norm = 0.0 if spec.norm_plus_one else 1.0
    return random_tensors(weight_shapes(spec), seed, dtype, device, norm, cuts)


def random_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    seed: int,
    dtype: torch.dtype,
    device: torch.device = _CPU,
    norm: float = 1.0,
    cuts: Cuts | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of ``shapes``, or what ``cuts`` takes of them; norms are ``norm``."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.empty(POOL, device="cpu").normal_(0.0, STD, generator=generator).to(device)
    pools = {torch.float32: pool, dtype: pool.to(dtype)}
    for local, cut in (cuts or uncut(shapes)).items():
        name, shape = cut.name, shapes[cut.name]
        kind = stored_dtype(name, dtype)
        if name.endswith(("norm.weight", ".expert_scale")):
            tensor = torch.full(shape, 1.0 if name.endswith(_ONES) else norm, dtype=kind, device=device)
        elif name.endswith(_RATES):
            tensor = _cut(pools[kind], name, seed, shape).abs().mul_(-50.0)
        else:
            tensor = _cut(pools[kind], name, seed, shape)
        yield local, tensor[_index(cut.ranges(tensor.dim()))].contiguous()


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The type a weight is held in: ``dtype``, but float32 for what only chooses experts and what decays a state."""
    return torch.float32 if name.endswith(_WIDE) else dtype


def _cut(pool: Tensor, name: str, seed: int, shape: tuple[int, ...]) -> Tensor:
    """Return ``shape`` numbers of the repeated pool, from the place that name and seed give."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    start = int.from_bytes(digest, "little") % POOL
    tensor = torch.empty(shape, dtype=pool.dtype, device=pool.device)
    flat, done = tensor.view(-1), 0
    while done < flat.numel():
        count = min(POOL - start, flat.numel() - done)
        flat[done : done + count] = pool[start : start + count]
        done, start = done + count, 0
    return tensor
