"""Selection over the vocabulary without sorting it: exact top candidates, min_p, top_k and top_p.

`truncate`: in this order, as in vLLM: min_p keeps ids at least min_p times as likely as the best one; top_k the k best
of them; top_p (Holtzman et al. 2020) the fewest best of those whose share reaches top_p. Each keeps a prefix of the
order (score descending, id ascending), so what remains is one number per row. Candidates come from `top_candidates`; a
row whose nucleus is larger than the candidates is redone with 16 times as many, which changes the time and never the
answer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.sampling.noise import exp_f32, tree_sum

CANDIDATES = 256
WIDEN = 16  # factor on the candidates where they were too few


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
    scores: Tensor, truncation: Truncation, num_candidates: int = CANDIDATES
) -> tuple[Tensor, Tensor]:
    """Keep what top_k and top_p keep of ``scores: [rows, vocab]`` (min_p is already applied).

    Returns (scores, ids), both ``[rows, n]``: kept ids in order, −inf beyond them. ``num_candidates``:
    ids to look at first where only top_p limits; it changes the time only.
    """
    vocab = scores.shape[1]
    limited = truncation.top_k < vocab
    widest = int(truncation.top_k[limited].max()) if bool(limited.any()) else 1
    num = min(vocab, widest if bool(limited.all()) else max(widest, num_candidates))
    values, ids = top_candidates(scores, num)
    lengths, short = _prefix_lengths(scores, values, truncation)
    values = torch.where(_first(lengths, num), values, -torch.inf)
    if not bool(short.any()):
        return values, ids
    again = short.nonzero().flatten()
    more_values, more_ids = truncate(scores[again], truncation.take(again), num * WIDEN)
    missing = more_values.shape[1] - num
    values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
    ids = torch.nn.functional.pad(ids, (0, missing))
    values[again], ids[again] = more_values, more_ids
    return values, ids


def _first(lengths: Tensor, num: int) -> Tensor:
    return torch.arange(num, device=lengths.device) < lengths[:, None]


def _prefix_lengths(scores: Tensor, values: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor]:
    """Return how many of the sorted ``values: [rows, n]`` each row keeps, and which rows need more than n to know."""
    vocab, num = scores.shape[1], values.shape[1]
    lengths = truncation.top_k.clamp(max=num)
    best = values[:, :1]
    # Sequential float64 sums: the mass of a prefix has the same bits however many candidates follow it.
    mass = exp_f32(values - best).to(torch.float64).cumsum(dim=1)
    total = mass.gather(1, lengths[:, None] - 1).squeeze(1)
    nucleus = truncation.top_p < 1.0
    unbounded = nucleus & (truncation.top_k >= vocab)
    if bool(unbounded.any()):
        rows = unbounded.nonzero().flatten()
        total[rows] = tree_sum(exp_f32(scores[rows] - best[rows]))
    wanted = truncation.top_p * total
    reached = (mass < wanted[:, None]).sum(dim=1) + 1
    lengths = torch.where(nucleus, torch.minimum(lengths, reached), lengths)
    unlimited = truncation.top_k >= vocab
    short = unlimited & (reached > num) if num < vocab else torch.zeros_like(unlimited)
    return lengths, short


def top_candidates(scores: Tensor, k: int, *, masked_too: bool = False) -> tuple[Tensor, Tensor]:
    """Return the best k of each row, in the order (score descending, id ascending), exact among equal scores.

    scores: ``[rows, vocab]`` float32 without NaN, ``1 ≤ k ≤ vocab``. Returns (scores, ids), both ``[rows, k]``.
    Which ids stand for scores of −inf is left open, since they cannot be sampled, unless ``masked_too``: then the
    lowest do.
    """
    values, ids = torch.topk(scores, k, dim=1, sorted=False)
    kth = values.amin(dim=1, keepdim=True)
    if scores.device.type != "cpu":
        return _in_order(scores, lowest_of_equals(scores, kth, k))
    # topk picks any of the ids that equal the k-th value; where there are more of them than places, pick the lowest.
    crowded = (scores >= kth).sum(dim=1, keepdim=True) > k
    if not masked_too:
        crowded &= kth > -torch.inf
    for row in crowded.squeeze(1).nonzero().flatten().tolist():
        above = (scores[row] > kth[row]).nonzero().flatten()
        equal = (scores[row] == kth[row]).nonzero().flatten()[: k - above.numel()]
        ids[row] = torch.cat((above, equal))
    return _in_order(scores, ids.sort(dim=1).values)


def lowest_of_equals(scores: Tensor, kth: Tensor, k: int) -> Tensor:
    """Ids ``[rows, k]``, ascending: all above ``kth [rows, 1]``, the lowest that equal it; without the host."""
    above, equal = scores > kth, scores == kth
    places = k - above.sum(dim=1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(dim=1) <= places))
    ids = torch.arange(scores.shape[1], device=scores.device)
    return torch.topk(torch.where(chosen, -ids, -scores.shape[1]), k, dim=1).values.neg()


def _in_order(scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """``ids [rows, k]`` ascend; the best first, with their scores."""
    values, order = scores.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)
