"""Native attention: each call passes where the batch's arrays lie (csrc/cpu/attention_kernel.cpp)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.attention import attention
from quire.kernels.attention.batch import AttentionShape, RaggedBatch
from quire.kernels.kv_blocks import KvView
from quire.kernels.registry import NATIVE_LEVELS, native
from quire.kernels.workspace import address, empty, heads_at, native_call

_KEY = ("native",)


def addresses(batch: RaggedBatch) -> tuple[int, int, int, int]:
    """Return where the batch's arrays lie: cu_seqlens_q, seq_lens, block_table, extents."""
    seqs = _address(batch.cu_seqlens_q), _address(batch.seq_lens)
    return *seqs, _address(batch.block_table), _address(batch.extents)


def _address(array: npt.NDArray[np.int64]) -> int:
    assert array.dtype == np.int64, array.dtype
    assert array.flags.c_contiguous
    return int(array.ctypes.data)


@attention.native(NATIVE_LEVELS)
def native_attention(
    isa: str, q: Tensor, kv: KvView, batch: RaggedBatch, shape: AttentionShape, sinks: Tensor | None
) -> Tensor:
    assert kv.stripe is None
    assert sinks is None or sinks.dtype == torch.float32
    y = empty(*q.shape[:2], kv.v_head_dim, dtype=q.dtype)
    call_native(isa, q, kv, batch, shape, sinks, y)
    return y


def call_native(
    isa: str, q: Tensor, kv: KvView, batch: RaggedBatch, shape: AttentionShape, sinks: Tensor | None, y: Tensor,
    stripe: tuple[int, int] = (0, 1), *, partial: bool = False,
) -> None:  # fmt: skip
    """Write attention to ``y``, or with ``partial`` the sums of the ``stripe``: index, count."""
    _, num_heads, head_dim = q.shape
    pieces = kv.pieces
    if q.stride(2) != 1 or q.stride(1) != head_dim:
        q = q.contiguous()
    assert kv.layout == "rows" or q.dtype == torch.bfloat16, q.dtype
    native.attention(
        *native_call(isa, q), pieces.dtype == torch.bfloat16, kv.layout == "tiles", *kv.native_codes(1),
        q.data_ptr(), q.stride(0), *heads_at(pieces), address(sinks), y.data_ptr(),
        *batch.plan(_KEY, lambda: addresses(batch)), num_heads, pieces.shape[1], head_dim, kv.v_head_dim, kv.block_size,
        shape.window or 0, shape.scale, shape.soft_cap or 0.0, kv.v_in_k, *stripe, partial,
    )  # fmt: skip
