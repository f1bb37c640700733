"""Linear on the whole matrix at once: torch's own choice of code by shape. Fast, and not exact."""

from __future__ import annotations

import torch

from quire.kernels.linear import reference
from quire.kernels.linear.packed import PackedLinear
from quire.kernels.registry import register


@register("linear.pack_empty", "whole")
def pack_empty(out_features: int, in_features: int, dtype: torch.dtype) -> PackedLinear:
    """Row-major ``[out_features, in_features]``, as torch wants it."""
    return PackedLinear(out_features, in_features, torch.empty(out_features, in_features, dtype=dtype))


register("linear.write_rows", "whole")(reference.write_rows)
register("linear.read_rows", "whole")(reference.read_rows)


@register("linear", "whole")
def linear(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """``x [num_tokens, in_features]`` → ``[num_tokens, out_features]``."""
    return torch.nn.functional.linear(x, packed.data, packed.bias)
