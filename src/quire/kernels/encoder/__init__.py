"""Ops of encoders: attention of whole sequences in which rows see each other both ways, and LayerNorm.

A step is cut into groups of sequences with one padded length, a multiple of 16 rows from each sequence's first one, so
the shapes that a sequence is computed in follow from its own length. The other sequences of a group are further
matrices of the same batched product, on one thread. That each of them then has the bits that it has alone is an
observation and no promise of torch: `kernels.attention` says where it was measured for decoders, and the tests of
`tests/encoders` compare these shapes on the CPU that runs them.

LayerNorm (Ba et al. 2016) is computed in fp32: torch sums a row in an order given by its length alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import layer_norm as torch_layer_norm

from quire.kernels.attention import ALIGN, TILE
from quire.kernels.pointwise import gelu, gelu_tanh, sigmoid
from quire.kernels.registry import op
from quire.kernels.threads import one_torch_thread


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of one padded length.

    ``rows [num_seqs · padded]``: the row of the step at each place, at padding the sequence's last one.
    ``places [own rows]``: the places that hold a row. ``lengths [num_seqs]``.
    """

    padded: int
    rows: Tensor
    places: Tensor
    lengths: Tensor


@dataclass(frozen=True, slots=True)
class WholeSequences:
    """The rows of a step, sequence after sequence: ``starts [num_seqs + 1]``."""

    starts: tuple[int, ...]
    groups: tuple[Group, ...]

    @property
    def num_rows(self) -> int:
        return self.starts[-1]


def whole_sequences(lengths: Sequence[int]) -> WholeSequences:
    """Return how a step of sequences with these ``lengths`` is cut."""
    sizes = np.asarray(lengths, np.int64)
    starts = np.concatenate(([0], np.cumsum(sizes)))
    padded = -(-sizes // ALIGN) * ALIGN
    groups = []
    for size in np.unique(padded):
        members = np.flatnonzero(padded == size)
        offsets = np.arange(size)
        inside = offsets < sizes[members, None]
        rows = starts[members, None] + np.minimum(offsets, sizes[members, None] - 1)
        groups.append(
            Group(
                int(size),
                torch.from_numpy(rows.reshape(-1)),
                torch.from_numpy(np.flatnonzero(inside)),
                torch.from_numpy(sizes[members]),
            )
        )
    return WholeSequences(tuple(starts.tolist()), tuple(groups))


def _bias(group: Group, rows: range, columns: range, window: int | None) -> Tensor:
    """Return −inf where a row may not look, else 0: fp32 ``[num_seqs, rows or 1, columns]``."""
    column, row = (torch.arange(span.start, span.stop) for span in (columns, rows))
    hidden = (column >= group.lengths[:, None])[:, None, :]
    if window is not None:
        # Rows of padding see all of the sequence that is there, so that no row sees nothing.
        far = (row[:, None] - column).abs() > window
        far = far & (row < group.lengths[:, None])[:, :, None]
        hidden = hidden | far
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


@op("encoder_attention")
def encoder_attention(
    qkv: Tensor, sequences: WholeSequences, num_heads: int, num_kv_heads: int, scale: float,
    window: int | None = None, relative: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``qkv [num_rows, (num_heads + 2 · num_kv_heads) · head_dim]`` → ``[num_rows, num_heads · head_dim]``, its dtype.

    A row at p sees the rows of its own sequence, with a ``window`` those at p − window … p + window.
    ``relative [num_heads, longest, longest]`` fp32 is added to the scores of rows and the columns that they see.
    """
    size = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    out = qkv.new_empty(qkv.shape[0], num_heads * size)
    for group in sequences.groups:
        padded, count = group.padded, len(group.lengths)
        heads = qkv.index_select(0, group.rows).view(count, padded, -1, size).permute(2, 0, 1, 3)
        q, k, v = split_heads(heads.float().contiguous()[None], num_heads, num_kv_heads)
        if num_kv_heads < num_heads:
            k, v = (part.repeat_interleave(num_heads // num_kv_heads, 1) for part in (k, v))
        q, k, v = (part.reshape(num_heads * count, padded, size) for part in (q.mul_(scale), k, v))
        mixed = torch.empty(num_heads, count, padded, size)
        # Scores of long texts take much memory: those of some rows are held at a time.
        for start in range(0, padded, 4 * TILE):
            rows = range(start, min(start + 4 * TILE, padded))
            columns = range(padded)
            if window is not None:
                columns = range(max(0, start - window) // ALIGN * ALIGN, min(rows.stop + window, padded))
            bias = _bias(group, rows, columns, window)
            if relative is not None:
                bias = bias + relative[:, None, start : rows.stop, : columns.stop]
            tile = _tile(q[:, start : rows.stop], k, v, columns, bias)
            mixed[:, :, start : rows.stop] = tile.view(num_heads, count, len(rows), size)
        padded_rows = mixed.permute(1, 2, 0, 3).reshape(count * padded, -1).to(qkv.dtype)
        out.index_copy_(0, group.rows[group.places], padded_rows.index_select(0, group.places))
    return out


def split_heads(heads: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of ``heads [n, num_heads + 2 · num_kv_heads, ...]``; views."""
    end = num_heads + num_kv_heads
    return heads[:, :num_heads], heads[:, num_heads:end], heads[:, end:]


def _tile(q: Tensor, k: Tensor, v: Tensor, columns: range, bias: Tensor) -> Tensor:
    """Return what the rows of ``q [num_heads · num_seqs, rows, size]`` get of the ``columns`` of ``k`` and ``v``."""
    k, v = (part[:, columns.start : columns.stop] for part in (k, v))
    with one_torch_thread():
        scores = torch.bmm(q, k.transpose(1, 2))
    by_sequence = scores.view(-1, bias.shape[-3], *scores.shape[1:])
    by_sequence += bias
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    total = weights.sum(-1, keepdim=True)
    with one_torch_thread():
        mixed = torch.bmm(weights, v)
    return mixed.div_(total)


@op("layer_norm")
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """``x [num_rows, size]`` → ``(x − mean) / sqrt(variance + eps) · weight + bias`` in x's dtype.

    ``weight``, ``bias``: fp32.
    """
    return torch_layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)


@op("add_layer_norm")
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return ``(layer_norm(residual + x), residual + x)``; the norm reads the sum before it is rounded."""
    total = residual.float() + x.float()
    normed = torch_layer_norm(total, x.shape[-1:], weight, bias, eps)
    return normed.to(x.dtype), total.to(x.dtype)


@op("activate")
def activate(x: Tensor, kind: str) -> Tensor:
    """Return the activation of ``x [num_rows, size]`` in its dtype: gelu, gelu_tanh, silu or relu, computed in fp32."""
    wide = x.float()
    if kind == "relu":
        return wide.clamp_(min=0.0).to(x.dtype)
    if kind == "silu":
        return sigmoid(wide).mul_(wide).to(x.dtype)
    return (gelu(wide) if kind == "gelu" else gelu_tanh(wide)).to(x.dtype)
