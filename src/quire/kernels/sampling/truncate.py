"""Truncation: min_p, top_k and top_p (Holtzman et al. 2020), without sorting the vocabulary.

In this order, as in vLLM: min_p keeps ids at least min_p times as likely as the best one; top_k the k best of them;
top_p the fewest best of those whose share reaches top_p. Each keeps a prefix of the order (score descending, id
ascending), so what remains is a number a row. Candidates come from `top_candidates`; a row whose nucleus is larger
than the candidates is redone with 16 times as many, which changes the time and never the answer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.sampling.exact_math import exp_f32, tree_sum
from quire.kernels.sampling.select import top_candidates

_NUCLEUS_CANDIDATES = 256
_WIDEN = 16


class Truncation(NamedTuple):
    """Per row; all ``[rows]``."""

    top_k: Tensor  # int64; vocab_size or more: off
    top_p: Tensor  # float64; 1: off
    min_p: Tensor  # float64; 0: off

    def take(self, rows: Tensor) -> Truncation:
        return Truncation(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def apply_min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    """Return ``scores: [rows, vocab]`` with −inf where the probability is below min_p times the row's largest."""
    floors = [math.log(p) if p > 0.0 else -math.inf for p in min_p.tolist()]
    floor = torch.tensor(floors, dtype=torch.float64, device=scores.device)
    threshold = scores.amax(dim=1).to(torch.float64) + floor
    return scores.masked_fill(scores.to(torch.float64) < threshold[:, None], -torch.inf)


def truncate(
    scores: Tensor, truncation: Truncation, num_candidates: int = _NUCLEUS_CANDIDATES
) -> tuple[Tensor, Tensor]:
    """Keep what top_k and top_p keep of ``scores: [rows, vocab]`` (min_p already applied).

    Returns (scores, ids), both ``[rows, n]``: kept ids in order, −inf beyond them. ``num_candidates`` is how many
    ids are looked at first where top_p alone limits; it changes the time only.
    """
    vocab = scores.shape[1]
    limited = truncation.top_k < vocab
    widest = int(truncation.top_k[limited].max()) if bool(limited.any()) else 1
    num = min(vocab, widest if bool(limited.all()) else max(widest, num_candidates))
    values, ids = top_candidates(scores, num)
    kept, short = _prefix_lengths(scores, values, truncation)
    values = torch.where(_first(kept, num), values, -torch.inf)
    if not bool(short.any()):
        return values, ids
    again = short.nonzero().flatten()
    more_values, more_ids = truncate(scores[again], truncation.take(again), num * _WIDEN)
    missing = more_values.shape[1] - num
    values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
    ids = torch.nn.functional.pad(ids, (0, missing))
    values[again], ids[again] = more_values, more_ids
    return values, ids


def _first(lengths: Tensor, num: int) -> Tensor:
    return torch.arange(num, device=lengths.device) < lengths[:, None]


def _prefix_lengths(scores: Tensor, values: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor]:
    """How many of the sorted ``values: [rows, n]`` each row keeps, and which rows need more than n to know."""
    vocab, num = scores.shape[1], values.shape[1]
    kept = truncation.top_k.clamp(max=num)
    best = values[:, :1]
    # Sequential float64 sums: the mass of a prefix has the same bits however many candidates follow it.
    mass = exp_f32(values - best).to(torch.float64).cumsum(dim=1)
    total = mass.gather(1, kept[:, None] - 1).squeeze(1)
    nucleus = truncation.top_p < 1.0
    whole = nucleus & (truncation.top_k >= vocab)
    if bool(whole.any()):
        rows = whole.nonzero().flatten()
        total[rows] = tree_sum(exp_f32(scores[rows] - best[rows]))
    wanted = truncation.top_p * total
    reached = (mass < wanted[:, None]).sum(dim=1) + 1
    kept = torch.where(nucleus, torch.minimum(kept, reached), kept)
    unlimited = truncation.top_k >= vocab
    short = unlimited & (reached > num) if num < vocab else torch.zeros_like(unlimited)
    return kept, short
