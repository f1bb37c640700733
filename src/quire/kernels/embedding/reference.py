"""Embedding look-up in torch: a copy, so exact."""

from __future__ import annotations

import torch

from quire.kernels.registry import register


@register("embedding", "reference")
def embedding(input_ids: torch.Tensor, table: torch.Tensor, scale: float) -> torch.Tensor:
    """``[num_tokens]`` → ``[num_tokens, hidden_size]``."""
    return scale_rows(table.index_select(0, input_ids), scale)


def scale_rows(rows: torch.Tensor, scale: float) -> torch.Tensor:
    """Multiply in place by ``scale`` rounded to the rows' dtype; 1 leaves them alone."""
    if scale == 1.0:
        return rows
    return rows.mul_(torch.tensor(scale, dtype=rows.dtype).item())
