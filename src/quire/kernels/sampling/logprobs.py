"""Log-probabilities of tokens: the op `token_logprobs`, and its parts, which a GPU runs as well."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.registry import op
from quire.kernels.sampling.noise import exp_f32, log_f64, tree_sum
from quire.kernels.sampling.truncate import top_candidates
from quire.request import TokenLogprobs


def log_normalizer(logits: Tensor) -> Tensor:
    """log Σ exp of each row of ``logits: [rows, vocab] float32``, float64 ``[rows]``; bits depend on the row alone."""
    best = logits.amax(dim=1, keepdim=True)
    return best.squeeze(1).to(torch.float64) + log_f64(tree_sum(exp_f32(logits - best)))


@op("token_logprobs")
def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Logprob and rank of ``token_ids: [rows]`` and the ``num_top[row]`` most likely ids of each row.

    ``logits: [rows, vocab]`` are raw: before bias, penalties, masks, temperature and truncation. Equal logits rank by
    id, so ranks are distinct and the lists deterministic.
    """
    tensors = logprob_tensors(logits, token_ids, min(max(num_top), logits.shape[1]))
    return assemble(token_ids.tolist(), num_top, *(part.tolist() for part in tensors))


def logprob_tensors(logits: Tensor, token_ids: Tensor, widest: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logprob float64, rank) of ``token_ids``, both ``[rows]``, and (ids, logprobs) of the best, ``[rows, widest]``.

    All are on the device of ``logits``; the host does not wait for a GPU.
    """
    normalizer = log_normalizer(logits)
    chosen = logits.gather(1, token_ids[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    ahead = (logits > chosen) | ((logits == chosen) & (ids < token_ids[:, None]))
    logprobs = chosen.squeeze(1).to(torch.float64) - normalizer
    ranks = ahead.sum(dim=1) + 1
    if widest == 0:
        return logprobs, ranks, token_ids.new_empty(len(ranks), 0), logprobs.new_empty(len(ranks), 0)
    values, best_ids = top_candidates(logits, widest, masked_too=True)
    return logprobs, ranks, best_ids, values.to(torch.float64) - normalizer[:, None]


def assemble(
    token_ids: Sequence[int], num_top: Sequence[int], logprobs: list[float], ranks: list[int],
    top_ids: list[list[int]], top_logprobs: list[list[float]],
) -> list[TokenLogprobs]:  # fmt: skip
    """Return one entry per row of what `logprob_tensors` found, on the host."""
    return [
        TokenLogprobs(
            token_id, logprobs[row], ranks[row], tuple(top_ids[row][:k]), tuple(top_logprobs[row][:k])
        )
        for row, (token_id, k) in enumerate(zip(token_ids, num_top, strict=True))
    ]
