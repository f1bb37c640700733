"""The noise of `kernels.sampling` in torch: Philox4x32-10, words by stream and token id, Gumbel-max over all ids."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.sampling.noise import MULTIPLIERS, ROUNDS, WEYL, WORD, Streams, gumbel_of_words

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32_10(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Ten rounds of Philox4x32 on words held in int64, 0 … 2**32 − 1; all tensors broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # int64 products wrap modulo 2**64, of which these are the high and the low word.
        product0 = c0 * MULTIPLIERS[0]
        product1 = c2 * MULTIPLIERS[1]
        c0 = ((product1 >> 32) & WORD) ^ c1 ^ k0
        c2 = ((product0 >> 32) & WORD) ^ c3 ^ k1
        c1 = product1 & WORD
        c3 = product0 & WORD
        k0 = (k0 + WEYL[0]) & WORD
        k1 = (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def random_words(streams: Streams, token_ids: Tensor) -> Tensor:
    """The 32-bit word of each (stream, token id): ``token_ids: [rows, n]`` -> int64 ``[rows, n]``."""
    purpose = torch.full_like(streams.positions, streams.purpose)
    words = philox4x32_10(
        (streams.positions[:, None], token_ids >> 2, purpose[:, None], streams.sample_indices[:, None]),
        ((streams.seeds & WORD)[:, None], ((streams.seeds >> 32) & WORD)[:, None]),
    )
    stacked = torch.stack([word.expand_as(token_ids) for word in words], dim=-1)  # [rows, n, 4]
    return stacked.gather(-1, (token_ids & 3).unsqueeze(-1)).squeeze(-1)


def gumbel_noise(streams: Streams, token_ids: Tensor) -> Tensor:
    """Gumbel noise of each (stream, token id): ``token_ids: int64 [rows, n]`` -> float64 ``[rows, n]``."""
    return gumbel_of_words(random_words(streams, token_ids))


def gumbel_argmax(scores: Tensor, streams: Streams) -> Tensor:
    """``scores: [rows, vocab] float32`` -> the id of the largest score + noise of each row, lowest id on ties."""
    rows, vocab = scores.shape
    token_ids = torch.arange(vocab, device=scores.device).expand(rows, vocab)
    return torch.argmax(scores.to(torch.float64) + gumbel_noise(streams, token_ids), dim=-1)
