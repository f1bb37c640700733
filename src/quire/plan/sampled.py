"""`sampled`: a roofline as a `CostModel`, which ``serve --slo`` starts from without a profile."""

from __future__ import annotations

from quire.plan.cost_model import CostModel, Curve, StepFeatures
from quire.plan.roofline import Roofline

_KEYS = 1_000_000


def sampled(roofline: Roofline, max_tokens: int) -> CostModel:
    """Return a cost model that agrees with ``roofline`` at powers of 2 of rows, up to ``max_tokens``, without K and V.

    Rows and logits are sampled together: a roofline's steps draw from each of few rows or from one of many, and the
    output matrix is read once either way.
    """
    one = roofline.seconds(StepFeatures(1, 1, 1, 0, 0, 0))
    knots = [1 << i for i in range(max(1, max_tokens).bit_length() + 1)]
    rows = [roofline.seconds(StepFeatures(n, 1, 1, 0, 0, 0)) - one for n in knots]
    with_keys = roofline.seconds(StepFeatures(1, 1, 1, _KEYS, 0, 0))
    with_pairs = roofline.seconds(StepFeatures(1, 1, 1, 0, 0, _KEYS))
    return CostModel(
        fixed_s=one,
        rows=Curve(tuple(map(float, knots)), tuple(max(0.0, s) for s in rows)),
        per_decode_kv_s=max(0.0, with_keys - one) / _KEYS,
        per_pair_s=max(0.0, with_pairs - one) / _KEYS,
    )
