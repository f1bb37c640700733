"""Paged attention on whole matrices: fast in torch, and not exact, since shapes follow the batch.

Single tokens are batched in groups of similar length over gathered keys; prompt chunks go one sequence at a time
through torch's fused attention. Both work in the cache's dtype with fp32 sums. Layers with a soft cap, with sinks or
with latent keys take the reference, which has everything.

Bytes moved: the keys and values of every sequence twice (gathered, then read), which a native kernel saves.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.kernels.attention import reference
from quire.kernels.attention.batch import AttentionShape, RaggedBatch
from quire.kernels.kv_view import KvView, gather_pages
from quire.kernels.registry import register

_GROUP = 8  # sequences that decode together: more would pad short ones to the length of long ones


@register("attention", "whole")
def attention(
    q: torch.Tensor, kv: KvView, batch: RaggedBatch, shape: AttentionShape, sinks: torch.Tensor | None
) -> torch.Tensor:
    """``q [num_tokens, num_heads, head_dim]`` → ``[num_tokens, num_heads, v_head_dim]``."""
    if sinks is not None or shape.soft_cap is not None or kv.v_in_k:
        return reference.attention(q, kv, batch, shape, sinks)
    out = q.new_empty(*q.shape[:2], kv.v_head_dim)
    singles, chunks = _split(batch)
    for ids, table, mask in _decode_groups(batch, kv.block_size, shape.window, singles):
        out[ids] = _decode(q[ids], kv, table, mask, shape.scale)
    for seq in chunks:
        start, end = int(batch.cu_seqlens_q[seq]), int(batch.cu_seqlens_q[seq + 1])
        out[start:end] = _chunk(q[start:end], kv, batch, seq, shape)
    return out


def _split(batch: RaggedBatch) -> tuple[list[int], list[int]]:
    """Return the sequences with one query, longest first, and the others."""
    q_lens = np.diff(batch.cu_seqlens_q)
    singles = np.flatnonzero(q_lens == 1)
    order = np.argsort(-batch.seq_lens[singles], kind="stable")
    return singles[order].tolist(), np.flatnonzero(q_lens > 1).tolist()


def _decode_groups(
    batch: RaggedBatch, block_size: int, window: int | None, singles: list[int]
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return (rows of q, block table, additive mask ``[seqs, 1, 1, positions]``) of each group, once a step."""
    key = ("whole", block_size, window)
    if key not in batch.plans:
        groups = []
        for start in range(0, len(singles), _GROUP):
            seqs = np.array(singles[start : start + _GROUP])
            lengths = batch.seq_lens[seqs]
            width = -(-int(lengths.max()) // block_size)
            position = np.arange(width * block_size)
            hidden = position >= lengths[:, None]
            if window is not None:
                hidden |= position < lengths[:, None] - window
            mask = torch.zeros(hidden.shape).masked_fill_(torch.from_numpy(hidden), float("-inf"))
            groups.append(
                (
                    torch.from_numpy(batch.cu_seqlens_q[seqs]),
                    torch.from_numpy(batch.block_table[seqs, :width]),
                    mask[:, None, None, :],
                )
            )
        batch.plans[key] = groups
    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = batch.plans[key]
    return found


def _decode(
    q: torch.Tensor, kv: KvView, table: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """One query a sequence: ``q [seqs, num_heads, head_dim]`` → ``[seqs, num_heads, v_head_dim]``."""
    seqs, num_heads, head_dim = q.shape
    kv_heads = kv.num_kv_heads
    keys, values = _gather(kv, table)  # [seqs, kv_heads, positions, dim]
    grouped = (q * scale).to(keys.dtype).view(seqs * kv_heads, num_heads // kv_heads, head_dim)
    scores = torch.bmm(grouped, keys.flatten(0, 1).transpose(1, 2)).float()
    weights = torch.softmax(scores.view(seqs, kv_heads, -1, keys.shape[2]) + mask, dim=-1)
    weights = weights.to(values.dtype).flatten(0, 1)
    return torch.bmm(weights, values.flatten(0, 1)).view(seqs, num_heads, -1).to(q.dtype)


def _chunk(q: torch.Tensor, kv: KvView, batch: RaggedBatch, seq: int, shape: AttentionShape) -> torch.Tensor:
    """The queries of one sequence: ``q [queries, num_heads, head_dim]`` → ``[queries, num_heads, v_head_dim]``."""
    queries, num_heads, _ = q.shape
    length = int(batch.seq_lens[seq])
    width = -(-length // kv.block_size)
    keys, values = _gather(kv, torch.from_numpy(batch.block_table[seq : seq + 1, :width]))
    group = num_heads // kv.num_kv_heads
    keys, values = (part[:, :, :length].repeat_interleave(group, dim=1) for part in (keys, values))
    causal = queries == length and shape.window is None
    mask = None
    if not causal:
        position = torch.arange(length)
        own = torch.arange(length - queries, length).unsqueeze(1)
        mask = position <= own
        if shape.window is not None:
            mask &= position > own - shape.window
    y = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0).to(keys.dtype),
        keys,
        values,
        attn_mask=mask,
        is_causal=causal,
        scale=shape.scale,
    )
    return y.squeeze(0).transpose(0, 1).to(q.dtype)


def _gather(kv: KvView, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``table [seqs, blocks]`` → K and V ``[seqs, kv_heads, blocks · block_size, dim]``, contiguous."""
    seqs, blocks = table.shape
    num_blocks, kv_heads, piece = kv.pieces.shape
    if kv.head_dim != kv.v_head_dim:
        return _take(kv.keys, table), _take(kv.values, table)
    # K and V parts are equally long, so the cache is a table of such parts, and one gather puts them in place.
    part, stride = piece // 2, kv.pieces.stride(0) // (piece // 2)
    parts = kv.pieces.as_strided(((num_blocks - 1) * stride + 2 * kv_heads, part), (part, 1))
    index = table.unsqueeze(1) * stride + 2 * torch.arange(kv_heads).view(-1, 1)
    size = (seqs, kv_heads, blocks * kv.block_size, kv.head_dim)
    keys = gather_pages(parts, index.view(-1)).view(size)
    return keys, gather_pages(parts, index.view(-1).add_(1)).view(size)


def _take(part: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Blocks of ``part [num_blocks, kv_heads, block_size, dim]`` → ``[seqs, kv_heads, positions, dim]``."""
    pages = torch.unflatten(part.index_select(0, table.reshape(-1)), 0, table.shape)
    return pages.transpose(1, 2).flatten(2, 3)
