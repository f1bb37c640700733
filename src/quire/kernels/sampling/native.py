"""Native sampling and log-probabilities (csrc/cpu/sampling_kernel.cpp)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.registry import native
from quire.kernels.sampling import COLUMNS, sample
from quire.kernels.sampling.logprobs import assemble, token_logprobs
from quire.kernels.threads import num_native_threads
from quire.request import TokenLogprobs


@sample.native()
def native_sample(
    isa: str, logits: Tensor, edited: Mapping[int, Tensor], columns: NDArray[np.void], purpose: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    assert logits.shape[0] == columns.size
    assert columns.flags.c_contiguous
    assert columns.dtype == COLUMNS
    rows, vocab = logits.shape
    stride, last = logits.stride()
    assert last == 1
    instead = []
    for row, changed in edited.items():
        assert changed.is_contiguous()
        instead.append((row, changed.data_ptr()))
    out = np.empty(2 * rows, np.int64)  # one array, since to ask for an address takes 1 µs
    at = out.ctypes.data
    native.sample(
        num_native_threads(), isa, logits.data_ptr(), stride, instead, columns.ctypes.data, rows, vocab, purpose,
        at, at + 8 * rows,
    )  # fmt: skip
    return out[:rows], out[rows:].view(np.float32)[:rows]


@token_logprobs.native()
def native_token_logprobs(
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
    columns = (logprobs.tolist(), ranks.tolist(), top_ids.tolist(), top_logprobs.tolist())
    return assemble(chosen.tolist(), wanted.tolist(), *columns)


def _addresses(logits: Tensor) -> NDArray[np.int64]:
    """Where each row of ``logits: [rows, vocab]`` lies."""
    assert logits.device.type == "cpu"
    assert logits.stride(1) == 1
    return logits.data_ptr() + np.arange(logits.shape[0]) * (logits.stride(0) * 4)
