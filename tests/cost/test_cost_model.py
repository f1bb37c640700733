"""The step-time model: its form, its fit, its file."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from quire.cost.cost_model import CostModel, Curve, StepFeatures, chunk_pairs, features
from quire.cost.fit import MeasuredStep, cross_validate, fit, nnls
from quire.cost.profile import HostCost, Profile, load_profile
from quire.errors import ConfigError
from quire.step import SeqPlan, StepPlan

MODEL = CostModel(
    fixed_s=0.008,
    rows=Curve((1.0, 32.0, 512.0, 2048.0), (0.0, 0.0, 0.02, 0.09)),
    logits=Curve((1.0, 64.0), (0.0, 0.004)),
    per_seq_s=1e-5,
    per_decode_kv_s=4e-8,
    per_chunk_kv_s=1e-8,
    per_pair_s=3e-10,
)


def step(rng: random.Random) -> StepFeatures:
    """A step of some decodes and, at times, a chunk."""
    decodes, rows = rng.choice((0, 1, 2, 7, 40, 64)), rng.choice((0, 2, 17, 250, 512, 2000))
    rows = rows or 2 * (decodes == 0)
    start = rng.randrange(4000)
    chunks = int(rows > 0)
    return StepFeatures(
        decodes + rows,
        decodes + chunks,
        decodes + chunks,
        decodes * rng.randrange(1, 4000),
        chunks * (start + rows),
        chunk_pairs(start, rows),
    )


def test_a_fit_finds_the_model_behind_exact_times() -> None:
    rng = random.Random(3)
    steps = [step(rng) for _ in range(300)]
    points = [MeasuredStep(s, MODEL.seconds(s)) for s in steps]
    knots = {"row_knots": (1, 32, 512, 2048), "logit_knots": (1, 64)}
    fitted = fit(points, **knots)
    for point in points:
        assert fitted.seconds(point.step) == pytest.approx(point.seconds, rel=1e-6)
    assert cross_validate(points, **knots).worst < 1e-6


def test_a_fit_of_noisy_times_is_better_than_the_noise() -> None:
    rng = random.Random(4)
    steps = [step(rng) for _ in range(300)]
    points = [MeasuredStep(s, MODEL.seconds(s) * rng.uniform(0.95, 1.05)) for s in steps]
    fitted = fit(points)
    truth = [abs(fitted.seconds(s) / MODEL.seconds(s) - 1) for s in steps]
    assert np.median(truth) < 0.015
    error = cross_validate(points)
    assert 0.01 < error.median < 0.05  # it sees the noise of the points: uniform in ± 5 %
    assert error.num_points == 300


def test_more_work_never_takes_less_time() -> None:
    rng = random.Random(5)
    points = [MeasuredStep(s := step(rng), MODEL.seconds(s) * rng.uniform(0.5, 1.5)) for _ in range(100)]
    fitted = fit(points)
    for point in points:
        for index in range(len(point.step)):
            more = point.step._replace(**{point.step._fields[index]: point.step[index] + 50})
            assert fitted.seconds(more) >= fitted.seconds(point.step)


def test_nnls_against_brute_force() -> None:
    rng = np.random.default_rng(6)
    for _ in range(50):
        a, b = rng.normal(size=(8, 4)), rng.normal(size=8)
        best = np.inf
        for mask in range(16):  # the solution is a least-squares one of some subset of the columns
            chosen = [i for i in range(4) if mask >> i & 1]
            x = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0] if chosen else np.zeros(0)
            if (x >= 0).all():
                best = min(best, float(np.linalg.norm(a[:, chosen] @ x - b)))
        x = nnls(a, b)
        assert (x >= 0).all()
        assert np.linalg.norm(a @ x - b) == pytest.approx(best, rel=1e-9)


def test_features_of_a_plan() -> None:
    plan = StepPlan(0, seqs=(SeqPlan(1, 0, 99, 1), SeqPlan(2, 0, 10, 1), SeqPlan(3, 0, 16, 4)))
    assert features(plan, {1, 2}) == StepFeatures(6, 3, 2, 100 + 11, 20, 17 + 18 + 19 + 20)


def test_a_decode_with_drafts_reads_its_keys_once() -> None:
    plan = StepPlan(0, seqs=(SeqPlan(1, 0, 99, 3, num_draft_tokens=2), SeqPlan(3, 0, 16, 4)))
    assert features(plan, {1}) == StepFeatures(7, 2, 3, 102, 20, 17 + 18 + 19 + 20, 101 + 102)


def test_terms_add_up() -> None:
    s = StepFeatures(100, 4, 4, 3000, 97, chunk_pairs(0, 97))
    terms = MODEL.fixed_s + MODEL.rows.at(100) + MODEL.logits.at(4) + MODEL.per_seq_s * 4
    terms += MODEL.per_decode_kv_s * 3000 + MODEL.spill.at(3000)
    terms += MODEL.per_chunk_kv_s * s.chunk_kv_tokens + MODEL.per_pair_s * s.chunk_pairs
    assert MODEL.seconds(s) == pytest.approx(terms, rel=1e-12)
    assert MODEL.plus(fixed_s=1.0, per_seq_s=0.5).seconds(s) == pytest.approx(
        MODEL.seconds(s) + 3.0, rel=1e-12
    )
    assert MODEL.seconds(StepFeatures(0, 0, 0, 0, 0, 0)) == 0.0


def test_curve_is_straight_between_and_beyond_its_knots() -> None:
    curve = Curve((1.0, 3.0, 7.0), (0.5, 0.5, 2.5))
    assert [curve.at(x) for x in (0, 1, 2, 3, 5, 7, 9)] == [0.5, 0.5, 0.5, 0.5, 1.5, 2.5, 3.5]


def test_json_keeps_every_bit(tmp_path: Path) -> None:
    assert CostModel.from_json(json.loads(json.dumps(MODEL.to_json()))) == MODEL
    points = (MeasuredStep(StepFeatures(1, 1, 1, 5, 0, 0), 0.1 + 0.2),)
    profile = Profile("quill", {"name": "x"}, {"threads": 2}, MODEL, HostCost(1e-4, 1e-6), points=points)
    profile.save(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile
    assert profile.step_time.fixed_s == MODEL.fixed_s + 1e-4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"fixed_s": -1.0}, "fixed_s"),
        ({"per_seq_s": float("nan")}, "per_seq_s"),
        ({"rows": {"knots": [1, 2], "values": [0.0]}}, "2 knots"),
        ({"rows": {"knots": [2, 1], "values": [0.0, 1.0]}}, "ascend"),
        ({"logits": [1, 2]}, "logits"),
        ({"per_token_s": 1.0}, "per_token_s"),
    ],
)
def test_wrong_numbers_are_named(change: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        CostModel.from_json(MODEL.to_json() | change)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "quire-profile-1"}'])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ConfigError, match=r"p\.json"):
        load_profile(tmp_path / "p.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile(tmp_path / "none.json")
