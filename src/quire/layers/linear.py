"""One linear of a model, possibly several matrices of the checkpoint in one (q, k, v; gate, up)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from quire.kernels.linear import linear, pack_empty, write_bias, write_rows
from quire.kernels.registry import KernelChoice
from quire.layers.weights import Place


class Linear:
    """``parts``: name → output features, stacked in that order. Weights lie in the layout of the kernel."""

    def __init__(
        self,
        parts: Mapping[str, int],
        in_features: int,
        dtype: torch.dtype,
        kernels: KernelChoice,
        *,
        bias: bool = False,
    ) -> None:
        self.parts = dict(parts)
        self.packed = pack_empty(
            sum(parts.values()), in_features, dtype, bias=bias, backend=kernels.backend("linear")
        )

    def places(self) -> dict[str, Place]:
        """Return ``{part}.weight [features, in_features]`` and, with biases, ``{part}.bias [features]``."""
        found: dict[str, Place] = {}
        start = 0
        for name, features in self.parts.items():
            found[f"{name}.weight"] = partial(write_rows, self.packed, start)
            if self.packed.bias is not None:
                found[f"{name}.bias"] = partial(write_bias, self.packed, start)
            start += features
        return found

    def __call__(self, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """``[num_tokens, in_features]`` → ``[num_tokens, sum of the parts]``, in x's dtype if nothing is said."""
        return linear(x, self.packed, out_dtype=out_dtype)
