"""Selection over the vocabulary: Gumbel-max without noise for hopeless ids, and exact top candidates.

`gumbel_argmax` equals `reference.gumbel_argmax` always. On a CPU it makes the random words with numpy (`cpu_words`),
bounds every perturbed score from above with one float32 logarithm, and computes the exact noise only of the few ids
whose bound reaches the best. It reads 4 bytes of logits an id and makes a quarter of a Philox block for it; the time
goes into the integer arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.sampling import cpu_words, reference
from quire.kernels.sampling.reference import Streams, gumbel_of_words

_IDS_AT_ONCE = 1 << 16  # ids whose words are made together: the temporaries then stay in the L2 cache
# The bound's float32 rounding errors add up to less than 1e-5 where they matter (scores within 30 of the best).
_MARGIN = 1e-3


def gumbel_noise(streams: Streams, token_ids: Tensor) -> Tensor:
    """Gumbel noise of each (stream, token id): ``token_ids: int64 [rows, n]`` -> float64 ``[rows, n]``."""
    if token_ids.device.type != "cpu":
        return reference.gumbel_noise(streams, token_ids)
    return gumbel_of_words(torch.from_numpy(cpu_words.random_words(streams, token_ids.numpy())))


def gumbel_argmax(scores: Tensor, streams: Streams) -> Tensor:
    """Draw one id a row: argmax of ``float64(scores) + gumbel_noise``, lowest id on ties.

    scores: ``[rows, vocab]`` float32; −inf never wins. Returns int64 ``[rows]``.
    """
    if scores.device.type != "cpu":
        return reference.gumbel_argmax(scores, streams)
    rows, vocab = scores.shape
    step = max(1, _IDS_AT_ONCE // vocab)
    row_parts, id_parts = [], []
    for start in range(0, rows, step):
        part = slice(start, start + step)
        row_part, id_part = _survivors(scores[part], streams.row_slice(start, start + step))
        row_parts.append(row_part + start)
        id_parts.append(id_part)
    row_of, id_of = torch.cat(row_parts), torch.cat(id_parts)
    if row_of.numel() == rows:
        return id_of
    exact = scores[row_of, id_of].to(torch.float64)
    exact += gumbel_noise(streams.take(row_of), id_of[:, None]).squeeze(1)
    return _first_max_by_row(row_of, id_of, exact, rows)


def _survivors(scores: Tensor, streams: Streams) -> tuple[Tensor, Tensor]:
    """The rows and the ids that may win, at least one a row, int64 ``[n]`` each, sorted by (row, id)."""
    complement = torch.from_numpy(cpu_words.uniform_complement(streams, scores.shape[1]))  # v = 1 − u
    # E = −log(u) lies between v and v / (1 − v), so g = −log(E) lies between −log(v) + log(1 − v) and −log(v):
    # both are tight for the large g that win.
    centered = scores - scores.amax(dim=1, keepdim=True)
    bound = centered - torch.log(complement)
    likely = bound.argmax(dim=1, keepdim=True)
    reached = bound.gather(1, likely) + torch.log1p(-complement.gather(1, likely))
    rows, ids = (bound >= reached - _MARGIN).nonzero(as_tuple=True)
    return rows, ids


def _first_max_by_row(row_of: Tensor, id_of: Tensor, values: Tensor, rows: int) -> Tensor:
    """Per row the id of the largest value; entries come sorted by (row, id), so the first one wins ties."""
    best = torch.full((rows,), -torch.inf, dtype=torch.float64).scatter_reduce_(0, row_of, values, "amax")
    winners = values == best[row_of]
    drawn = torch.full((rows,), torch.iinfo(torch.int64).max)
    return drawn.scatter_reduce_(0, row_of[winners], id_of[winners], "amin")


def gumbel_argmax_of(scores: Tensor, token_ids: Tensor, streams: Streams) -> Tensor:
    """Draw among given ids: ``scores, token_ids: [rows, n]``, −inf for padding -> int64 ``[rows]``."""
    values = scores.to(torch.float64) + gumbel_noise(streams, token_ids)
    best = values.amax(dim=1, keepdim=True)
    beaten = torch.iinfo(torch.int64).max
    return token_ids.masked_fill(values < best, beaten).amin(dim=1)


def top_candidates(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The best k of each row, in the order (score descending, id ascending), exact among equal scores.

    scores: ``[rows, vocab]`` float32 without NaN, ``1 ≤ k ≤ vocab``. Returns (scores, ids), both ``[rows, k]``.
    Which ids stand for scores of −inf is left open: nobody can draw them.
    """
    values, ids = torch.topk(scores, k, dim=1, sorted=False)
    kth = values.amin(dim=1, keepdim=True)
    if scores.device.type != "cpu":
        return _in_order(scores, lowest_of_equals(scores, kth, k))
    # topk picks any of the ids that equal the k-th value; where there are more of them than places, pick the lowest.
    crowded = ((scores >= kth).sum(dim=1, keepdim=True) > k) & (kth > -torch.inf)
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
