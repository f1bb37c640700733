"""Sinks (gpt-oss) in the reference of attention: one more logit in each head's denominator, with no value."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.attention import PairChunk


def add_sinks(
    acc: Tensor, total: Tensor, top: Tensor, sinks: Tensor, chunk: PairChunk, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Add ``sinks [num_heads]`` to the denominator of a chunk's rows, rescaling everything to the new maximum."""
    logits = _sinks_of_rows(sinks, chunk, acc.shape[0], num_tokens)
    new_top = torch.maximum(top, logits)
    rescale = torch.exp(top - new_top)
    return acc * rescale.unsqueeze(-1), total * rescale + torch.exp(logits - new_top)


def _sinks_of_rows(sinks: Tensor, chunk: PairChunk, kv_heads: int, num_tokens: int) -> Tensor:
    """``sinks [num_heads]`` → the logit of each row of the chunk's items, ``[kv_heads, items, used]``."""
    by_row = sinks.view(kv_heads, -1).repeat(1, num_tokens)  # rows are token-major
    by_row = torch.cat((by_row, by_row.new_zeros(kv_heads, 1)), dim=1)
    return by_row.index_select(1, chunk.row_index).view(kv_heads, -1, chunk.used)
