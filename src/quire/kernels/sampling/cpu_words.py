"""Random words on a CPU, in numpy: half the time of torch's int64 arithmetic, and less than that for few words.

The same words as `reference.random_words`, which the tests compare.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.kernels.sampling.reference import MULTIPLIERS, ROUNDS, WEYL, WORD, Streams

Words = NDArray[np.uint64]
_MASK, _SHIFT = np.uint64(WORD), np.uint64(32)
_MULTIPLIER0, _MULTIPLIER1 = (np.uint64(m) for m in MULTIPLIERS)
_WEYL0, _WEYL1 = (np.uint64(w) for w in WEYL)


def random_words(streams: Streams, token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The 32-bit word of each (stream, token id): ``token_ids: [rows, n]`` -> int64 ``[rows, n]``."""
    blocks = _philox(streams, token_ids.astype(np.uint64) >> np.uint64(2))
    return np.choose(token_ids & 3, blocks).astype(np.int64)


def uniform_complement(streams: Streams, vocab: int) -> NDArray[np.float32]:
    """About 1 − u of every id, never 0: float32 ``[rows, vocab]``. Whole blocks are made at once."""
    num_blocks = (vocab + 3) // 4
    blocks = _philox(streams, np.arange(num_blocks, dtype=np.uint64)[None, :])
    complement = np.empty((*blocks[0].shape, 4), np.float32)
    for word, values in enumerate(blocks):
        complement[:, :, word] = _MASK - values
    complement += np.float32(0.5)
    complement *= np.float32(2.0**-32)
    return complement.reshape(-1, num_blocks * 4)[:, :vocab]


def _philox(streams: Streams, block_ids: Words) -> tuple[Words, Words, Words, Words]:
    """Four words of each block: ``block_ids: [rows or 1, n]`` -> four times uint64 ``[rows, n]``."""
    seeds, sample_indices, positions = (
        column.numpy().astype(np.uint64)[:, None]
        for column in (streams.seeds, streams.sample_indices, streams.positions)
    )
    shape = np.broadcast_shapes(seeds.shape, block_ids.shape)
    c0, c1 = np.broadcast_to(positions, shape), np.broadcast_to(block_ids, shape)
    c2, c3 = np.full(shape, streams.purpose, np.uint64), np.broadcast_to(sample_indices, shape)
    k0, k1 = seeds & _MASK, seeds >> _SHIFT
    for _ in range(ROUNDS):
        product0, product1 = c0 * _MULTIPLIER0, c2 * _MULTIPLIER1
        c0 = np.right_shift(product1, _SHIFT, dtype=np.uint64)
        c0 ^= c1
        c0 ^= k0
        c2 = np.right_shift(product0, _SHIFT, dtype=np.uint64)
        c2 ^= c3
        c2 ^= k1
        c1 = np.bitwise_and(product1, _MASK, out=product1)
        c3 = np.bitwise_and(product0, _MASK, out=product0)
        k0, k1 = (k0 + _WEYL0) & _MASK, (k1 + _WEYL1) & _MASK
    return c0, c1, c2, c3
