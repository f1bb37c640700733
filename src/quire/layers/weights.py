"""What layers are built with, and how weights reach them: a module names its tensors, with a loader for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from quire.kernels.collective import Collectives, Group
from quire.kernels.linear import PackedLinear, op_of, write_rows
from quire.kernels.registry import Backend, KernelChoice, Op, P, R
from quire.layers.context import ContextParallel
from quire.parallel.shard import Shard
from quire.quant.rtn import quantize
from quire.quant.stored import CHUNK, DEVICE_CHUNK, StoredMatrix, StoredStack, Weight, row_ranges
from quire.weight_format import PLAIN, WeightFormat

T = TypeVar("T")
WeightLoader = Callable[[Weight], None]
Formats = Mapping[str, WeightFormat]  # name of a quantized weight → how it is held
NO_FORMATS: Formats = MappingProxyType({})


class Stage(NamedTuple):
    """Which ends of the model a pipeline stage has: the embedding, the last norm and the output matrix."""

    is_first: bool = True
    is_last: bool = True

    def has(self, name: str, tied: bool) -> bool:
        """Whether the weight ``name`` is on this stage, given that it has those of its layers."""
        if name == "embed.weight":
            return self.is_first or (self.is_last and tied)
        return self.is_last or name not in ("norm.weight", "lm_head.weight")


WHOLE = Stage()


def prefixed(prefix: str, loaders: Mapping[str, WeightLoader]) -> dict[str, WeightLoader]:
    """Return ``loaders`` under names that start with ``prefix``."""
    return {prefix + name: loader for name, loader in loaders.items()}


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The ranks that share every layer, over the tp or the ep axis, and what this one has of the weights."""

    group: Group
    shard: Shard


def tensor_parallel(groups: Collectives, shard: Shard) -> TensorParallel | None:
    """Return the ranks that share the layers with this one, if there are others."""
    group = groups.of_layers
    return None if group is None else TensorParallel(group, shard)


@dataclass(frozen=True, slots=True)
class Build:
    """What the layers of a model are built with. ``formats`` has the names of weights within the layer."""

    dtype: torch.dtype
    kernels: KernelChoice
    eps: float  # norms' epsilon
    norm_plus_one: bool = False
    formats: Formats = field(default_factory=dict)
    tp: TensorParallel | None = None  # None: this rank has all heads and whole matrices
    # Of this rank's weights.
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    cp: ContextParallel | None = None  # None: this rank has every position of a sequence
    wide_sums: bool = False  # norms that add leave their sum in fp32

    @property
    def tp_group(self) -> Group | None:
        """The ranks whose partial sums are added."""
        return None if self.tp is None or self.tp.shard.topology.ep > 1 else self.tp.group

    @property
    def ep_group(self) -> Group | None:
        """The ranks whose results are gathered."""
        return None if self.tp is None or self.tp.shard.topology.ep == 1 else self.tp.group

    def under(self, prefix: str) -> Build:
        """Return the same for the weights whose names start with ``prefix``, named without it."""
        return replace(self, formats=_within(prefix, self.formats), shapes=_within(prefix, self.shapes))

    def held(self, name: str) -> WeightFormat:
        """Return the format of the weight ``name``."""
        return self.formats.get(name, PLAIN)

    def backend(self, op: str) -> Backend:
        return self.kernels.backend(op)

    def of(self, op: Op[P, R]) -> Callable[P, R]:
        """Return the version of ``op`` that the layers call."""
        return self.kernels.of(op)

    def matrix_backend(self, format: WeightFormat) -> Backend:
        """Return the backend that multiplies with matrices of format ``held``."""
        return self.kernels.backend(op_of(format))


def _within(prefix: str, items: Mapping[str, T]) -> dict[str, T]:
    return {name.removeprefix(prefix): item for name, item in items.items() if name.startswith(prefix)}


def copy_into(target: Tensor) -> WeightLoader:
    """Return a weight loader that copies into ``target``, converting to its dtype."""

    def load(weight: Weight) -> None:
        assert isinstance(weight, Tensor)
        assert weight.shape == target.shape, (weight.shape, target.shape)
        target.copy_(weight)

    return load


@dataclass(frozen=True, slots=True)
class MatrixLoader:
    """A weight loader that writes a matrix at the output features ``start …``, or a stack into as many matrices."""

    matrices: Sequence[PackedLinear]
    start: int
    is_stack: bool = False

    def __call__(self, weight: Weight) -> None:
        """Take ``weight [n, in_features]``, or a stack of them: ``[len(matrices), n, in_features]``."""
        parts: Sequence[Tensor | StoredMatrix] | Tensor
        if not self.is_stack:
            assert not isinstance(weight, StoredStack)
            parts = [weight]
        else:
            assert not isinstance(weight, StoredMatrix)
            parts = weight.matrices if isinstance(weight, StoredStack) else weight
        for packed, part in zip(self.matrices, parts, strict=True):
            write_weight(packed, self.start, part)


def write_weight(packed: PackedLinear, start: int, weight: Weight) -> None:
    """Write a matrix ``[n, in_features]`` at the output features ``start …``: as it is, decoded, or rounded.

    Quantized matrices are written in ranges of rows, so that there is never a second copy of a large one.
    """
    if isinstance(weight, StoredMatrix):
        for row, part in weight.ranges():
            write_rows(packed, start + row, part.widened(packed.format))
        return
    assert not isinstance(weight, StoredStack)
    if not packed.format.quantized:
        write_rows(packed, start, weight)
        return
    backend = KernelChoice((packed.backend, "reference")).backend("round_to_nearest")
    device = packed.data.device
    chunk = CHUNK if device.type == "cpu" else DEVICE_CHUNK
    for row, stop in row_ranges(weight.shape[0], weight.shape[1], chunk):
        plain = weight[row:stop].to(device)  # a GPU rounds its weights itself
        write_rows(packed, start + row, quantize(plain, packed.format, backend=backend))
