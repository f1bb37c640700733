"""The sampling ops: counter-based noise, Gumbel-max, exact exp/log/sum and exact top candidates.

    sample             logits [rows, vocab] + the parameters of each row -> token ids
    token_logprobs     logits [rows, vocab] + token ids -> logprobs, ranks and the most likely ids
    gumbel_argmax      scores [rows, vocab] + streams -> token ids [rows]
    gumbel_noise       streams x token ids -> noise, float64
    typical_ids        logits of one row -> the ids that typical_p keeps
    top_candidates     scores [rows, vocab] -> the best k of each row, ties to the lowest id
    exp_f32, log_f64, tree_sum     the same bits on every device, for every batch and thread count

**Streams.** The noise of one token id is named by (seed, sample_index, position, token id, purpose). Philox4x32-10
(Salmon et al. 2011) maps it one-to-one to a 64-bit key, a 128-bit counter and one of four output words::

    key      = (seed & 0xffffffff, seed >> 32)                      seed as 64 bits, two's complement
    counter  = (position, token id >> 2, purpose, sample_index)     four neighbouring ids share one block
    word     = token id & 3

**Noise.** ``u = (word + 0.5) * 2**-32`` lies in (0, 1), both ends excluded, symmetric; ``g = -log(-log(u))`` with
`log_f64`, which is made of correctly rounded float64 operations only. The sampled token is the argmax over ids of
``float64(score) + g``, ties to the lowest id. Any implementation that follows these lines gives the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.registry import Backend, find
from quire.kernels.sampling import native, reference  # noqa: F401  registers both
from quire.kernels.sampling.exact_math import exp_f32, log_f64, tree_sum
from quire.kernels.sampling.noise import Streams, gumbel_argmax, gumbel_argmax_of, gumbel_noise
from quire.kernels.sampling.truncate import keep_typical, top_candidates, typical_ids
from quire.request import TokenLogprobs

__all__ = [
    "Streams", "exp_f32", "gumbel_argmax", "gumbel_argmax_of", "gumbel_noise", "keep_typical", "log_f64",
    "sample", "token_logprobs", "top_candidates", "tree_sum", "typical_ids",
]  # fmt: skip


def sample(
    logits: Tensor, edited: Mapping[int, Tensor], columns: NDArray[np.void], *, purpose: int, backend: Backend
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Sample one token per row: temperature, min_p, top_k, top_p, Gumbel-max; rows without noise take the largest.

    ``logits: [rows, vocab] float32`` stays as it is; ``edited[row]: [vocab]`` stands in for a row of it. ``columns``:
    `reference.COLUMNS [rows]`. Returns (ids, largest logits), both ``[rows]``; a row whose largest logit is not finite
    (a NaN counts as the largest) has no valid id.
    """
    assert logits.shape[0] == columns.size
    sampled: tuple[NDArray[np.int64], NDArray[np.float32]] = find("sample", backend)(
        logits, edited, columns, purpose
    )
    return sampled


def token_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: Sequence[int], *, backend: Backend = "reference"
) -> list[TokenLogprobs]:
    """Logprob and rank of ``token_ids: [rows]`` and the ``num_top[row]`` most likely ids of each row.

    ``logits: [rows, vocab]`` are raw. Equal logits rank by id, so ranks are distinct and the lists deterministic.
    """
    found: list[TokenLogprobs] = find("token_logprobs", backend)(logits, token_ids, num_top)
    return found
