"""Locally typical sampling (Meister et al. 2023).

With p the probabilities of a row and H their entropy, order the ids by |−log p − H|, ties to the lowest id, and keep
the first whose probabilities reach ``typical_p`` together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.sampling.noise import exp_f32, log_f64, tree_sum
from quire.kernels.sampling.truncate import CANDIDATES, WIDEN, top_candidates


def typical_ids(
    logits: Tensor, temperature: float, typical_p: float, num_candidates: int = CANDIDATES
) -> Tensor:
    """Return the ids to keep of ``logits: [vocab] float32``, int64; every bit depends on the row alone.

    A row whose largest logit is not finite is kept whole, since the sampler has its own error for it.
    ``num_candidates`` changes the time only.
    """
    best = logits.amax()
    if not bool(torch.isfinite(best)):
        return torch.arange(logits.shape[0], device=logits.device)
    scores = (logits - best) / torch.tensor(temperature, dtype=torch.float32, device=logits.device)
    weights = exp_f32(scores)
    total = tree_sum(weights)
    surprise = log_f64(total[None]) - scores.to(torch.float64)
    share = weights.to(torch.float64) / total
    likely = weights > 0.0
    entropy = tree_sum(torch.where(likely, share * surprise, torch.zeros_like(share)))
    nearness = torch.where(likely, -(surprise - entropy).abs(), torch.full_like(surprise, -torch.inf))
    num = min(logits.shape[0], num_candidates)
    while True:
        _, ids = top_candidates(nearness[None], num)
        mass = share[ids[0]].cumsum(dim=0)  # in order, so that its bits do not depend on how many follow
        count = int((mass < typical_p * tree_sum(share)).sum()) + 1
        if count <= num or num == logits.shape[0]:
            return ids[0, :count]
        num = min(logits.shape[0], num * WIDEN)


def keep_typical(row: Tensor, temperature: float, typical_p: float) -> None:
    """Write −inf over what `typical_ids` does not keep of ``row: [vocab] float32``."""
    ids = typical_ids(row, temperature, typical_p)
    values = row[ids]
    row.fill_(-torch.inf)
    row[ids] = values
