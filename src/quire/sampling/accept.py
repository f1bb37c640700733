"""Acceptance of drafts that keeps the distribution of the tokens, and not the tokens themselves.

With the default rule a draft is accepted while it equals the token that plain decoding samples. With the rules here the
tokens depend on the drafts, and so on the load, which decides how many drafts there are.

- *rejection* (Leviathan et al. 2023, Chen et al. 2023): with the target's distribution p and the proposer's q, draft d
  is accepted with probability min(1, p(d) / q(d)), else a token is sampled from max(0, p − q), normalized. Each token
  has the distribution p. A proposer without a distribution (n-grams) has q(d) = 1.
- *typical* (Medusa, Cai et al. 2024, §2.3.1): d is accepted if p(d) ≥ min(ε, δ · exp(−entropy of p)), else a token is
  sampled from p. The distribution changes: unlikely tokens become rarer.

In both, p is what the sampler would sample from: behind penalties, masks, temperature and truncation. Greedy rows have
all of p on their largest logit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import one_hot

from quire.kernels.sampling import MIN_P, RANDOM, TRUNCATED
from quire.kernels.sampling.noise import Streams, gumbel_argmax, random_words
from quire.kernels.sampling.truncate import Truncation, apply_min_p, truncate

AcceptRule = Literal["exact", "rejection", "typical"]

# Purposes of noise beside that of sampled tokens (0): words of its counter.
ACCEPT_NOISE, RESIDUAL_NOISE = 1, 2
EPSILON, DELTA = 0.09, 0.3  # of typical acceptance, as in the paper
_SCRATCH_ELEMENTS = 1 << 21  # rows are taken in slices of this many numbers


class Draft(NamedTuple):
    """A draft that a row verifies. ``probs: [vocab] float32``: the distribution it was sampled from; None: certain."""

    token_id: int
    probs: Tensor | None = None


def probabilities(scores: Tensor, columns: NDArray[np.void]) -> Tensor:
    """Return the distribution that each row is sampled from, float64 ``[rows, vocab]``.

    ``scores: [rows, vocab] float32``: logits behind the logits processors, each row with a finite largest one.
    ``columns``: `COLUMNS [rows]`. A greedy row has all its mass on the lowest id of its largest score.
    """
    features = columns["features"]
    greedy = torch.from_numpy(features & RANDOM == 0)
    scores = scores - scores.amax(dim=1, keepdim=True)
    scores[~greedy] /= _tensor(columns, "temperature")[~greedy, None]
    limits = Truncation(*(_tensor(columns, name) for name in ("top_k", "top_p", "min_p")))
    rows = torch.from_numpy(np.flatnonzero(features & MIN_P))
    if rows.numel():
        scores[rows] = apply_min_p(scores[rows], limits.min_p[rows])
    rows = torch.from_numpy(np.flatnonzero(features & TRUNCATED))
    if rows.numel():
        kept, ids = truncate(scores[rows], limits.take(rows))
        scores[rows] = torch.full_like(scores[rows], -torch.inf).scatter_reduce_(1, ids, kept, "amax")
    found = scores.to(torch.float64).softmax(dim=1)
    found[greedy] = one_hot(scores[greedy].argmax(dim=1), scores.shape[1]).to(torch.float64)
    return found


def sample_with_drafts(
    scores: Tensor, columns: NDArray[np.void], drafts: Sequence[Draft], plain: NDArray[np.int64], rule: AcceptRule
) -> NDArray[np.int64]:  # fmt: skip
    """Return a token per row: its draft where that is accepted, else another one.

    ``scores`` and ``columns`` as in `probabilities`; ``plain [rows]``: what plain decoding samples.
    """
    parts = []
    step = max(1, _SCRATCH_ELEMENTS // scores.shape[1])
    for start in range(0, columns.size, step):
        part = slice(start, start + step)
        p = probabilities(scores[part], columns[part])
        token_ids = torch.tensor([draft.token_id for draft in drafts[part]])
        if rule == "rejection":
            parts.append(_by_rejection(p, token_ids, drafts[part], columns[part]))
        else:
            parts.append(_if_typical(p, token_ids, torch.from_numpy(plain[part])))
    return torch.cat(parts).numpy()


def _by_rejection(p: Tensor, token_ids: Tensor, drafts: Sequence[Draft], columns: NDArray[np.void]) -> Tensor:
    seeds, indices, positions = (_tensor(columns, name) for name in ("seed", "sample_index", "position"))
    streams = Streams(seeds, indices, positions, ACCEPT_NOISE)
    q = one_hot(token_ids, p.shape[1]).to(torch.float64)
    for row, draft in enumerate(drafts):
        if draft.probs is not None:
            q[row] = draft.probs
    words = torch.from_numpy(random_words(streams, token_ids[:, None].numpy()))
    uniform = (words.to(torch.float64) + 0.5) * 2.0**-32
    accepted = (uniform * q.gather(1, token_ids[:, None]) < p.gather(1, token_ids[:, None])).squeeze(1)
    residual = (p - q).clamp_(min=0.0)
    # Where p and q differ by rounding alone, the residual may be zero.
    residual = torch.where(residual.sum(dim=1, keepdim=True) > 0.0, residual, p)
    scores = residual.log().to(torch.float32)
    return torch.where(accepted, token_ids, gumbel_argmax(scores, streams._replace(purpose=RESIDUAL_NOISE)))


def _if_typical(p: Tensor, token_ids: Tensor, plain: Tensor) -> Tensor:
    entropy = -torch.xlogy(p, p).sum(dim=1)
    threshold = (DELTA * torch.exp(-entropy)).clamp_(max=EPSILON)
    accepted = p.gather(1, token_ids[:, None]).squeeze(1) >= threshold
    return torch.where(accepted, token_ids, plain)


def _tensor(columns: NDArray[np.void], name: str) -> Tensor:
    return torch.from_numpy(columns[name].copy())
