"""Log-probabilities of the raw logits: before bias, penalties, masks, temperature and truncation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.registry import register
from quire.kernels.sampling.exact_math import exp_f32, log_f64, tree_sum
from quire.kernels.sampling.select import top_candidates
from quire.request import TokenLogprobs


def log_normalizer(logits: Tensor) -> Tensor:
    """log Σ exp of each row of ``logits: [rows, vocab] float32``, float64 ``[rows]``; bits depend on the row alone."""
    best = logits.amax(dim=1, keepdim=True)
    return best.squeeze(1).to(torch.float64) + log_f64(tree_sum(exp_f32(logits - best)))


@register("token_logprobs", "reference")
def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """See `quire.kernels.sampling.token_logprobs`."""
    found = logprob_tensors(logits, token_ids, min(max(num_top), logits.shape[1]))
    return assemble(token_ids.tolist(), num_top, *(part.tolist() for part in found))


def logprob_tensors(logits: Tensor, token_ids: Tensor, widest: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logprob float64, rank) of ``token_ids``, both ``[rows]``, and (ids, logprobs) of the best, ``[rows, widest]``.

    All on the device of ``logits``, which a GPU's host does not wait for.
    """
    normalizer = log_normalizer(logits)
    chosen = logits.gather(1, token_ids[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    ahead = (logits > chosen) | ((logits == chosen) & (ids < token_ids[:, None]))
    logprobs = chosen.squeeze(1).to(torch.float64) - normalizer
    ranks = ahead.sum(dim=1) + 1
    if widest == 0:
        return logprobs, ranks, token_ids.new_empty(len(ranks), 0), logprobs.new_empty(len(ranks), 0)
    values, best_ids = top_candidates(logits, widest)
    return logprobs, ranks, best_ids, values.to(torch.float64) - normalizer[:, None]


def assemble(
    token_ids: Sequence[int],
    num_top: Sequence[int],
    logprobs: list[float],
    ranks: list[int],
    top_ids: list[list[int]],
    top_logprobs: list[list[float]],
) -> list[TokenLogprobs]:
    """One entry a row of what `logprob_tensors` found, on the host."""
    return [
        TokenLogprobs(
            token_id, logprobs[row], ranks[row], tuple(top_ids[row][:k]), tuple(top_logprobs[row][:k])
        )
        for row, (token_id, k) in enumerate(zip(token_ids, num_top, strict=True))
    ]
