"""Native sampling (csrc/cpu/sampling_kernel.cpp): the reference's tokens and logprobs, bit for bit, at every level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels import sampling
from quire.kernels.registry import native
from quire.kernels.sampling import COLUMNS, assemble
from quire.kernels.threads import num_native_threads
from quire.request import TokenLogprobs


@sampling.sample.native()
def sample(
    isa: str, logits: Tensor, edited: Mapping[int, Tensor], columns: NDArray[np.void], purpose: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    assert logits.shape[0] == columns.size
    assert columns.flags.c_contiguous
    assert columns.dtype == COLUMNS
    addresses = _addresses(logits)
    for row, changed in edited.items():
        assert changed.is_contiguous()
        addresses[row] = changed.data_ptr()
    rows = columns.size
    ids, best = np.empty(rows, np.int64), np.empty(rows, np.float32)
    native.sample(
        num_native_threads(), isa, addresses.ctypes.data, columns.ctypes.data, rows, logits.shape[1], purpose,
        ids.ctypes.data, best.ctypes.data,
    )  # fmt: skip
    return ids, best


@sampling.token_logprobs.native()
def token_logprobs(
    isa: str, logits: Tensor, token_ids: Tensor, num_top: Sequence[int]
) -> list[TokenLogprobs]:
    rows, vocab = logits.shape
    wanted = np.minimum(np.array(num_top, np.int64), vocab)
    width = int(wanted.max(initial=0))
    addresses = _addresses(logits)
    chosen = token_ids.contiguous().numpy()
    logprobs, ranks = np.empty(rows), np.empty(rows, np.int64)
    top_ids, top_logprobs = np.empty((rows, width), np.int64), np.empty((rows, width))
    native.logprobs(
        num_native_threads(), isa, addresses.ctypes.data, chosen.ctypes.data, wanted.ctypes.data, rows, vocab,
        width, logprobs.ctypes.data, ranks.ctypes.data, top_ids.ctypes.data, top_logprobs.ctypes.data,
    )  # fmt: skip
    found = (logprobs.tolist(), ranks.tolist(), top_ids.tolist(), top_logprobs.tolist())
    return assemble(chosen.tolist(), wanted.tolist(), *found)


def _addresses(logits: Tensor) -> NDArray[np.int64]:
    """Where each row of ``logits: [rows, vocab]`` lies."""
    assert logits.device.type == "cpu"
    assert logits.stride(1) == 1
    return logits.data_ptr() + np.arange(logits.shape[0]) * (logits.stride(0) * 4)
