"""Acceptance of drafts that keeps the distribution of the tokens, and not the tokens themselves.

With the default rule a draft is accepted while it equals the token that plain decoding samples. With the rules here the
tokens depend on the drafts, and so on the load, which decides how many drafts there are.

- *rejection* (Leviathan et al. 2023, Chen et al. 2023): with the target's distribution p and the proposer's q, draft d
  is accepted with probability min(1, p(d) / q(d)), else a token is sampled from max(0, p − q), normalized. Each token
  has the distribution p. A proposer without a distribution (n-grams) has q(d) = 1. Where several drafts may follow a
  token (trees; SpecInfer, Miao et al. 2023), they are tried in order, the next with that residual in the place of p.
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

from quire.kernels.sampling import MIN_P, RANDOM, SCRATCH_ELEMENTS, TRUNCATED
from quire.kernels.sampling.noise import Streams, gumbel_argmax, random_words
from quire.kernels.sampling.truncate import Truncation, apply_min_p, truncate

AcceptRule = Literal["exact", "rejection", "typical"]

# Purposes of noise beside that of sampled tokens (0): words of its counter.
ACCEPT_NOISE, RESIDUAL_NOISE = 1, 2
EPSILON, DELTA = 0.09, 0.3  # typical acceptance, values of the paper


class Draft(NamedTuple):
    """A draft that a row verifies. ``probs: [vocab] float32``: the distribution it was sampled from; None: certain.

    That of a sibling in a tree is its distribution once the earlier siblings are known.
    """

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
        scores_kept, ids = truncate(scores[rows], limits.take(rows))
        scores[rows] = torch.full_like(scores[rows], -torch.inf).scatter_reduce_(1, ids, scores_kept, "amax")
    p = scores.to(torch.float64).softmax(dim=1)
    p[greedy] = one_hot(scores[greedy].argmax(dim=1), scores.shape[1]).to(torch.float64)
    return p


def sample_with_drafts(
    scores: Tensor, columns: NDArray[np.void], drafts: Sequence[Sequence[Draft]], plain: NDArray[np.int64],
    rule: AcceptRule,
) -> NDArray[np.int64]:  # fmt: skip
    """Return a token per row: one of its drafts where that is accepted, else another one. A row has at least a draft.

    ``scores`` and ``columns`` as in `probabilities`; ``plain [rows]``: what plain decoding samples.
    """
    parts = []
    step = max(1, SCRATCH_ELEMENTS // 2 // scores.shape[1])
    for start in range(0, columns.size, step):
        part = slice(start, start + step)
        p = probabilities(scores[part], columns[part])
        if rule == "rejection":
            parts.append(_by_rejection(p, drafts[part], columns[part]))
        else:
            parts.append(_if_typical(p, drafts[part], torch.from_numpy(plain[part])))
    return torch.cat(parts).numpy()


def _by_rejection(p: Tensor, drafts: Sequence[Sequence[Draft]], columns: NDArray[np.void]) -> Tensor:
    seeds, indices, positions = (_tensor(columns, name) for name in ("seed", "sample_index", "position"))
    streams = Streams(seeds, indices, positions, ACCEPT_NOISE)
    tokens = torch.full((p.shape[0],), -1)
    for place in range(max(map(len, drafts))):
        rows = [row for row, own in enumerate(drafts) if place < len(own) and tokens[row] < 0]
        if not rows:
            break
        token_ids = torch.tensor([drafts[row][place].token_id for row in rows])
        q = one_hot(token_ids, p.shape[1]).to(torch.float64)
        for row, of_row in zip(rows, q, strict=True):
            probs = drafts[row][place].probs
            if probs is not None:
                of_row.copy_(probs)
        words = torch.from_numpy(random_words(streams.take(torch.tensor(rows)), token_ids[:, None].numpy()))
        uniform = (words.to(torch.float64) + 0.5) * 2.0**-32
        target = p[rows]
        accepted = (uniform * q.gather(1, token_ids[:, None]) < target.gather(1, token_ids[:, None])).squeeze(
            1
        )
        tokens[rows] = torch.where(accepted, token_ids, -1)
        residual = (target - q).clamp_(min=0.0)
        total = residual.sum(dim=1, keepdim=True)
        # Where p and q differ by rounding alone, the residual may be zero.
        p[rows] = torch.where(total > 0.0, residual / total, target)
    others = gumbel_argmax(p.log().to(torch.float32), streams._replace(purpose=RESIDUAL_NOISE))
    return torch.where(tokens >= 0, tokens, others)


def _if_typical(p: Tensor, drafts: Sequence[Sequence[Draft]], plain: Tensor) -> Tensor:
    entropy = -torch.xlogy(p, p).sum(dim=1)
    threshold = (DELTA * torch.exp(-entropy)).clamp_(max=EPSILON)
    tokens = plain.clone()
    for row, own in enumerate(drafts):
        likely = [draft.token_id for draft in own if p[row, draft.token_id] >= threshold[row]]
        if likely:
            tokens[row] = max(likely, key=lambda token_id: float(p[row, token_id]))
    return tokens


def _tensor(columns: NDArray[np.void], name: str) -> Tensor:
    return torch.from_numpy(columns[name].copy())
