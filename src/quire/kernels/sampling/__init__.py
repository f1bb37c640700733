"""The sampling ops: counter-based noise, Gumbel-max, exact exp/log/sum and exact top candidates.

    gumbel_argmax      scores [rows, vocab] + streams -> token ids [rows]
    gumbel_noise       streams x token ids -> noise, float64
    top_candidates     scores [rows, vocab] -> the best k of each row, ties to the lowest id
    exp_f32, log_f64, tree_sum     the same bits on every device, for every batch and thread count

**Streams.** One draw is named by (seed, sample_index, position, token id, purpose). Philox4x32-10 (Salmon et al. 2011)
maps it one-to-one to a 64-bit key, a 128-bit counter and one of four output words::

    key      = (seed & 0xffffffff, seed >> 32)                      seed as 64 bits, two's complement
    counter  = (position, token id >> 2, purpose, sample_index)     four neighbouring ids share one block
    word     = token id & 3

**Noise.** ``u = (word + 0.5) * 2**-32`` lies in (0, 1), both ends excluded, symmetric; ``g = -log(-log(u))`` with
`log_f64`, which is made of correctly rounded float64 operations only. The draw is the argmax over ids of
``float64(score) + g``, ties to the lowest id. Any implementation that follows these lines gives the same tokens.
"""

from quire.kernels.sampling.exact_math import exp_f32, log_f64, tree_sum
from quire.kernels.sampling.reference import Streams, philox4x32_10
from quire.kernels.sampling.select import gumbel_argmax, gumbel_argmax_of, gumbel_noise, top_candidates

__all__ = [
    "Streams",
    "exp_f32",
    "gumbel_argmax",
    "gumbel_argmax_of",
    "gumbel_noise",
    "log_f64",
    "philox4x32_10",
    "top_candidates",
    "tree_sum",
]
