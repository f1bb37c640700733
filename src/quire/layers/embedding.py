"""Token embedding and output matrix, which may be one matrix."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quire.kernels.linear import PackedLinear, pack_empty, read_rows
from quire.kernels.pointwise import scale_rows, take_rows
from quire.layers.linear import Linear
from quire.layers.weights import Build, WeightLoader, copy_into, write_weight


class Embedding:
    """Input table and output matrix of a model.

    Tied embeddings are one matrix in the layout of the linear kernel; a quantized table is in that layout too.
    """

    def __init__(self, vocab_size: int, hidden_size: int, build: Build, *, tied: bool, scale: float) -> None:
        self._take_rows, self._scale_rows = build.of(take_rows), build.of(scale_rows)
        self._scale = torch.tensor(scale, dtype=build.dtype).item()  # rounded first, as in training
        held = build.held("embed.weight")
        of_head = held if tied else build.held("lm_head.weight")
        self._head = Linear(
            {"head": vocab_size}, hidden_size, replace(build, formats={"head.weight": of_head})
        )
        self._table: Tensor | None = None
        # Holds the rows where there is no table.
        self._packed: PackedLinear | None = self._head.packed if tied else None
        if not tied and held.quantized:
            self._packed = pack_empty(
                vocab_size, hidden_size, build.dtype, bias=False, backend=build.matrix_backend(held), format=held
            )  # fmt: skip
        elif not tied:
            self._table = torch.empty(vocab_size, hidden_size, dtype=build.dtype)
        self._tied = tied

    def weight_loaders(self) -> dict[str, WeightLoader]:
        head = self._head.weight_loaders()["head.weight"]
        if self._tied:
            return {"embed.weight": head}
        if self._packed is not None:
            return {"embed.weight": partial(write_weight, self._packed, 0), "lm_head.weight": head}
        assert self._table is not None
        return {"embed.weight": copy_into(self._table), "lm_head.weight": head}

    def __call__(self, input_ids: Tensor) -> Tensor:
        """``input_ids [num_tokens]`` → ``[num_tokens, hidden_size]``, scaled (Gemma, Granite)."""
        if self._packed is not None:
            rows = read_rows(self._packed, input_ids)
        else:
            assert self._table is not None
            rows = self._take_rows(self._table, input_ids)
        return rows if self._scale == 1.0 else self._scale_rows(rows, self._scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden [num_logits, hidden_size]`` → fp32 ``[num_logits, vocab_size]``."""
        return self._head(hidden, out_dtype=torch.float32)
