"""Native attention: over tiles (csrc/cpu/attention_tiles_kernel.cpp) or rows (attention_kernel.cpp) of K and V.

Steps of 64 positions at absolute multiples of 64, fp32 softmax and sums. A row's bits are those of its own keys and
values in order of position: see the kernel.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.attention.batch import AttentionShape, RaggedBatch
from quire.kernels.kv_blocks import KvView
from quire.kernels.registry import NATIVE_LEVELS, native, register_native
from quire.kernels.threads import num_native_threads
from quire.kernels.workspace import address, empty

_KEY = ("native",)


def addresses(batch: RaggedBatch) -> tuple[int, int, int, int]:
    """Return where the batch's arrays lie: cu_seqlens_q, seq_lens, block_table, extents."""
    return (
        _address(batch.cu_seqlens_q),
        _address(batch.seq_lens),
        _address(batch.block_table),
        _address(batch.extents),
    )


def _address(array: npt.NDArray[np.int64]) -> int:
    assert array.dtype == np.int64, array.dtype
    assert array.flags.c_contiguous
    return int(array.ctypes.data)


@register_native("attention", NATIVE_LEVELS)
def attention(
    isa: str,
    q: torch.Tensor,
    kv: KvView,
    batch: RaggedBatch,
    shape: AttentionShape,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """``q [num_tokens, num_heads, head_dim]`` → ``[num_tokens, num_heads, v_head_dim]``."""
    tokens, num_heads, head_dim = q.shape
    pieces = kv.pieces
    if q.stride(2) != 1 or q.stride(1) != head_dim:
        q = q.contiguous()
    assert kv.layout == "rows" or q.dtype == torch.bfloat16, q.dtype
    assert sinks is None or sinks.dtype == torch.float32
    y = empty(tokens, num_heads, kv.v_head_dim, dtype=q.dtype)
    native.attention(
        num_native_threads(), isa, q.dtype == torch.bfloat16, pieces.dtype == torch.bfloat16, kv.layout == "tiles",
        pieces.dtype == torch.int8, q.data_ptr(), q.stride(0), pieces.data_ptr(), pieces.stride(0),
        pieces.stride(1), address(sinks), y.data_ptr(), *batch.plan(_KEY, lambda: addresses(batch)), num_heads,
        pieces.shape[1], head_dim, kv.v_head_dim, kv.block_size, shape.window or 0, shape.scale,
        shape.soft_cap or 0.0, kv.v_in_k,
    )  # fmt: skip
    return y
