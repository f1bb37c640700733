"""FlashInfer's prefill over Quire's blocks, where it is installed and the tuner found it faster on this GPU.

A table of `kernels.block_sizes` says so with ``"flashinfer": 1`` beside the sizes of `attention_prefill`: the tuner
writes that where this very function gave our result and took less time. FlashInfer then computes the steps with prompts
that no graph holds, single tokens included, and never in the invariant mode. Called as FlashInfer documents
`BatchPrefillWithPagedKVCacheWrapper` (docs.flashinfer.ai); K and V are views of the blocks, not copies.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.attention.batch import AttentionShape, RaggedBatch
from quire.kernels.block_sizes import Sizes
from quire.kernels.kv_blocks import KvView

WORKSPACE_BYTES = 128 << 20  # recommended by its documentation
DIMS = (64, 128, 256)


def wanted(sizes: Sizes, kv: KvView) -> bool:
    """Whether the table's ``sizes`` ask for FlashInfer, it is installed, and it supports these heads."""
    if not sizes.get("flashinfer") or importlib.util.find_spec("flashinfer") is None:
        return False
    plain = kv.pieces.dtype in (torch.bfloat16, torch.float16) and not kv.v_in_k
    return plain and kv.head_dim == kv.v_head_dim and kv.head_dim in DIMS


def attend(q: Tensor, kv: KvView, batch: RaggedBatch, shape: AttentionShape, out: Tensor) -> None:
    """Compute the whole ``batch`` into ``out``. The first layer of a kind plans the step for all of them."""
    key = ("flashinfer", shape, kv.num_kv_heads, kv.head_dim)
    wrapper = batch.plan(key, lambda: _planned(q, kv, batch, shape))
    out.copy_(wrapper.run(q.contiguous(), (kv.keys, kv.values)))


def _planned(q: Tensor, kv: KvView, batch: RaggedBatch, shape: AttentionShape) -> Any:
    blocks = -(-batch.seq_lens // kv.block_size)
    rows = np.arange(batch.block_table.shape[1]) < blocks[:, None]
    arrays = (
        batch.cu_seqlens_q,
        np.append(0, np.cumsum(blocks)),
        batch.block_table[rows],
        batch.seq_lens - (blocks - 1) * kv.block_size,
    )
    flashinfer = importlib.import_module("flashinfer")
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
    wrapper.plan(
        *(torch.from_numpy(array.astype(np.int32)) for array in arrays),
        num_qo_heads=shape.num_heads, num_kv_heads=kv.num_kv_heads, head_dim_qk=kv.head_dim, page_size=kv.block_size,
        causal=True, window_left=-1 if shape.window is None else shape.window - 1,
        logits_soft_cap=shape.soft_cap, sm_scale=shape.scale, q_data_type=q.dtype, kv_data_type=q.dtype,
    )  # fmt: skip
    return wrapper
