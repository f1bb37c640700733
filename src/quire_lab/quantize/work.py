"""`LayerWork`: what a method gets of one layer, and may change in it before its matrices are rounded."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.modelspec import LayerSpec
from quire_lab.quantize.forward import InputStats
from quire_lab.quantize.grid import Rounded
from quire_lab.quantize.scheme import Scheme
from quire_lab.quantize.source import Matrix


@dataclass(slots=True)
class LayerWork:
    """One layer: ``weights`` fp32 by the matrices' names, and ``plain`` tensors by canonical names, without prefix.

    A method may move factors from one to another as long as their product stays. ``factors``: what the inputs of a
    matrix were multiplied by since ``stats`` were taken. ``importance``: of its inputs, where a file has it.
    """

    spec: LayerSpec
    matrices: tuple[Matrix, ...]
    schemes: dict[str, Scheme | None]
    weights: dict[str, Tensor]
    plain: dict[str, Tensor]
    stats: dict[str, InputStats]
    norm_plus_one: bool = False
    changed: set[str] = field(default_factory=set)
    factors: dict[str, Tensor] = field(default_factory=dict)
    importance: dict[str, Tensor] = field(default_factory=dict)

    def matrix_of(self, part: str) -> Matrix | None:
        """Return the matrix that is quantized, and is ``part`` ("attn.v") alone."""
        for matrix in self.matrices:
            if len(matrix.parts) == 1 and matrix.parts[0].endswith(f".{part}.weight"):
                return matrix if self.schemes[matrix.name] is not None else None
        return None

    def readers_of(self, part: str) -> list[Matrix]:
        """Return the matrices that read what the one with ``part`` reads; none where one of them is not quantized."""
        wanted = next((m for m in self.matrices if any(p.endswith(f".{part}.weight") for p in m.parts)), None)
        if wanted is None or wanted.name not in self.stats:
            return []
        readers = [m for m in self.matrices if self.stats.get(m.name) is self.stats[wanted.name]]
        return readers if all(self.schemes[m.name] is not None for m in readers) else []

    def gram(self, matrix: Matrix) -> Tensor | None:
        """Return the mean of xᵀx of what ``matrix`` reads now; None where no row of the text reached it."""
        stats = self.stats.get(matrix.name)
        if stats is None or stats.num_rows == 0:
            return None
        factor = self.factors.get(matrix.name)
        return stats.gram if factor is None else stats.gram * factor * factor.unsqueeze(1)

    def rows(self, matrix: Matrix) -> Tensor:
        """Return some rows that ``matrix`` reads now."""
        rows, factor = self.stats[matrix.name].rows, self.factors.get(matrix.name)
        return rows if factor is None else rows * factor

    def scale_inputs(self, matrix: Matrix, scale: Tensor) -> None:
        """Multiply the columns of ``matrix`` by ``scale [in]``; its rows are divided elsewhere."""
        self.weights[matrix.name] = self.weights[matrix.name] * scale
        self.factors[matrix.name] = self.factors.get(matrix.name, torch.ones(())) / scale

    def divide_outputs(self, matrix: Matrix, scale: Tensor) -> None:
        """Divide the rows of ``matrix``, which is one part, and its bias by ``scale [out]``."""
        self.weights[matrix.name] = self.weights[matrix.name] / scale.unsqueeze(1)
        bias = matrix.parts[0].split(".", 2)[2].replace(".weight", ".bias")
        if bias in self.plain:
            self.plain[bias] = (self.plain[bias].float() / scale).to(self.plain[bias].dtype)
            self.changed.add(bias)

    def divide_norm(self, name: str, scale: Tensor) -> Tensor:
        """Divide the weights of a norm by about ``scale``; return by what, given how they are stored."""
        stored = self.plain[name]
        one = 1.0 if self.norm_plus_one else 0.0
        before = stored.float() + one
        self.plain[name] = (before / scale - one).to(stored.dtype)
        self.changed.add(name)
        after = self.plain[name].float() + one
        return torch.where((after != 0.0) & (before != 0.0), before / after, 1.0)


Results = dict[str, Rounded]
