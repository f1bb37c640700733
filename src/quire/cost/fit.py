"""Measured steps → `CostModel`: non-negative least squares on relative errors, with the cross-validated error.

Every term is a cost, so every coefficient is ≥ 0. A curve is a sum of ramps (each ≥ 0 from one knot to the next), so it
can only rise. Each equation is divided by its seconds, so that a step of 1 ms counts as much as one of 1 s: first by
the measured seconds, then by those that the previous fit predicts. With measured seconds alone, a step that was slow by
chance counts for less than one that was fast: with errors of 25 % the model comes out 12 % too fast.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from quire.cost.cost_model import FLAT, CostModel, Curve, StepFeatures
from quire.errors import ConfigError

ROW_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 4096, 16384)  # beyond 512 the dot units are the bound
LOGIT_KNOTS = (0, 1, 4, 16, 64, 256, 1024)  # the first sampled row reads the output matrix
SPILL_KNOTS = (1 << 14, 1 << 15, 1 << 16, 1 << 17)  # keys of all decodes
FOLDS = 8
REWEIGHTED = 4  # fits, the first by measured seconds
# A measurement is cut to as many medians, and the weight of a step is at least its seconds divided by it.
FAR = 4.0
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step and its seconds: the mean of its repetitions, outliers capped."""

    step: StepFeatures
    seconds: float


def cut_mean(seconds: Sequence[float]) -> float:
    """Return the mean, with values capped at `FAR` medians.

    Not the median: a shared machine is slow for some seconds of each minute, and so is a server on it.
    """
    middle = statistics.median(seconds)
    if middle <= 0.0:  # a late reader takes many tokens at once
        return statistics.fmean(seconds)
    return statistics.fmean(min(s, FAR * middle) for s in seconds)


@dataclass(frozen=True, slots=True)
class FitError:
    """|predicted / measured − 1| over steps left out of the fit, in `FOLDS` folds."""

    median: float
    p90: float
    worst: float
    num_points: int


def fit(
    points: Sequence[MeasuredStep],
    *,
    row_knots: Sequence[int] = ROW_KNOTS,
    logit_knots: Sequence[int] = LOGIT_KNOTS,
) -> CostModel:
    """Return the model with the least squared relative error.

    Raises:
        ConfigError: no points, or one without rows or without time.
    """
    _check(points)
    rows, logits = _knots(row_knots, points, 0), _knots(logit_knots, points, 2)
    most_keys = max(point.step.decode_kv_tokens for point in points)
    spill = [k for k in SPILL_KNOTS if 2 * k <= most_keys]
    seconds = np.array([point.seconds for point in points])
    columns = np.array([_columns(point.step, rows, logits, spill) for point in points], dtype=float)
    weights = seconds
    for _ in range(REWEIGHTED):
        x = scaled_nnls(columns / weights[:, None], seconds / weights)
        weights = np.maximum(columns @ x, seconds / FAR)
    parts = np.split(x[6:], np.cumsum([len(rows) - 1, len(logits) - 1]))
    fixed_s, per_seq_s, per_decode_kv_s, per_chunk_kv_s, per_pair_s, per_draft_pair_s = map(float, x[:6])
    if not any(point.step.draft_pairs for point in points):  # nothing was drafted: as pairs of chunks
        per_draft_pair_s = per_pair_s
    return CostModel(
        fixed_s,
        _sum_of_ramps(rows, parts[0]),
        _sum_of_ramps(logits, parts[1]),
        per_seq_s,
        per_decode_kv_s,
        per_chunk_kv_s,
        per_pair_s,
        spill=_sum_of_hinges([*spill, most_keys], parts[2]) if spill else FLAT,
        per_draft_pair_s=per_draft_pair_s,
    )


def cross_validate(points: Sequence[MeasuredStep], **knots: Sequence[int]) -> FitError:
    """Return the error on points left out of the fit: each `FOLDS`-th of them in turn.

    The points with the fewest and the most tokens always stay in the fit, which is not meant to extrapolate.
    """
    _check(points)
    ends = {min(p.step.num_tokens for p in points), max(p.step.num_tokens for p in points)}
    inner = [i for i, p in enumerate(points) if p.step.num_tokens not in ends]
    if len(inner) < FOLDS:
        raise ConfigError(f"{len(inner)} inner points are too few to cross-validate: at least {FOLDS}")
    errors: list[float] = []
    for fold in range(FOLDS):
        left_out = set(inner[fold::FOLDS])
        model = fit([p for i, p in enumerate(points) if i not in left_out], **knots)
        errors += [abs(model.seconds(points[i].step) / points[i].seconds - 1.0) for i in left_out]
    median, p90 = np.percentile(errors, [50, 90])
    return FitError(float(median), float(p90), max(errors), len(points))


def _check(points: Sequence[MeasuredStep]) -> None:
    if not points:
        raise ConfigError("a cost model needs measured steps, and there are none")
    for point in points:
        if point.step.num_tokens < 1 or point.seconds <= 0.0:
            raise ConfigError(f"{point} must have at least one row and more than 0 seconds")


def _knots(knots: Sequence[int], points: Sequence[MeasuredStep], index: int) -> tuple[int, ...]:
    """Return the knots below the measured maximum, then that: a ramp that no point reaches has no height."""
    most = max(point.step[index] for point in points)
    inside = [k for k in knots if k < most]
    return (*inside, most) if inside else (knots[0],)


def _columns(
    step: StepFeatures, rows: Sequence[int], logits: Sequence[int], spill: Sequence[int]
) -> list[float]:
    return [
        1.0,
        step.num_seqs,
        step.decode_kv_tokens,
        step.chunk_kv_tokens,
        step.chunk_pairs,
        step.draft_pairs,
        *_ramps(step.num_tokens, rows),
        *_ramps(step.num_logits, logits),
        *(max(0, step.decode_kv_tokens - k) for k in spill),
    ]


def _ramps(x: int, knots: Sequence[int]) -> list[float]:
    """Return the position of ``x`` between each knot and the next: 0 … 1."""
    return [min(1.0, max(0.0, (x - a) / (b - a))) for a, b in pairwise(knots)]


def _sum_of_ramps(knots: Sequence[int], steps: Array) -> Curve:
    return Curve(tuple(float(k) for k in knots), (0.0, *(float(v) for v in np.cumsum(steps))))


def _sum_of_hinges(knots: Sequence[int], slopes: Array) -> Curve:
    """Return Σ slope · max(0, x − knot); the last knot only ends the last segment."""
    values = (sum(s * max(0, x - k) for k, s in zip(knots, slopes, strict=False)) for x in knots)
    return Curve(tuple(float(k) for k in knots), tuple(float(v) for v in values))


def scaled_nnls(a: Array, b: Array) -> Array:
    """Return `nnls` of columns scaled to length 1, since they differ by many orders of magnitude."""
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0.0] = 1.0
    scaled: Array = nnls(a / scale, b) / scale
    return scaled


def nnls(a: Array, b: Array) -> Array:
    """Return x ≥ 0 that minimises ‖a·x − b‖ (Lawson & Hanson 1974, ch. 23). ``a: [m, n]``, ``b: [m]``, ``x: [n]``."""
    num_columns = a.shape[1]
    x = np.zeros(num_columns)
    passive = np.zeros(num_columns, bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(a.T @ b).max()))
    for _ in range(10 * num_columns):
        gradient = a.T @ (b - a @ x)
        gradient[passive] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            return x
        passive[best] = True
        x = _step_inside(a, b, x, passive)
    return x


def _step_inside(a: Array, b: Array, x: Array, passive: NDArray[np.bool_]) -> Array:
    """Solve for the passive columns, and make those active that would become negative (``passive`` changes)."""
    while True:
        z = np.zeros_like(x)
        z[passive] = np.linalg.lstsq(a[:, passive], b, rcond=None)[0]
        below = passive & (z <= 0.0)
        if not below.any():
            return z
        way = float(np.min(x[below] / (x[below] - z[below]))) if (x[below] > 0).any() else 0.0
        x = x + way * (z - x)
        passive &= x > 1e-14
        x[~passive] = 0.0
        if not passive.any():
            return x
