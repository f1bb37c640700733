"""Token embedding and output matrix, which may be one matrix."""

from __future__ import annotations

import torch

from quire.kernels.embedding import take_rows
from quire.kernels.linear import read_rows
from quire.kernels.pointwise import scale_rows
from quire.kernels.registry import KernelChoice
from quire.layers.linear import Linear
from quire.layers.weights import Place, copy_into


class Embedding:
    """Input table and output matrix of a model. Tied, there is one matrix, in the layout of the linear kernel."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        kernels: KernelChoice,
        *,
        tied: bool,
        scale: float,
    ) -> None:
        self._take_backend = kernels.backend("take_rows")
        self._scale_backend = kernels.backend("scale_rows")
        self._scale = torch.tensor(scale, dtype=dtype).item()  # rounded first, as the models were trained
        self._table = None if tied else torch.empty(vocab_size, hidden_size, dtype=dtype)
        self._head = Linear({"head": vocab_size}, hidden_size, dtype, kernels)

    def places(self) -> dict[str, Place]:
        head = self._head.places()["head.weight"]
        if self._table is None:
            return {"embed.weight": head}
        return {"embed.weight": copy_into(self._table), "lm_head.weight": head}

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``input_ids [num_tokens]`` → ``[num_tokens, hidden_size]``, scaled (Gemma, Granite)."""
        if self._table is None:
            rows = read_rows(self._head.packed, input_ids)
        else:
            rows = take_rows(self._table, input_ids, backend=self._take_backend)
        return scale_rows(rows, self._scale, backend=self._scale_backend)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden [num_logits, hidden_size]`` → fp32 ``[num_logits, vocab_size]``."""
        return self._head(hidden, out_dtype=torch.float32)
