"""Look-up in torch: a copy, so exact."""

from __future__ import annotations

import torch

from quire.kernels.registry import register


@register("take_rows", "reference")
def take_rows(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``[num_tokens]`` → ``[num_tokens, size]``."""
    return table.index_select(0, ids)
