"""What the predictor learns from steps, and the mean that it is made of."""

from __future__ import annotations

import pytest

from quire.scheduler.predictor import FIRST_STEP_S, Mean, Predictor


def test_mean_counts_first_values_alike_then_follows() -> None:
    mean = Mean(memory=4)
    for value in (4.0, 2.0, 3.0):
        mean.add(value)
    assert mean.value == pytest.approx(3.0)
    for _ in range(40):
        mean.add(7.0)
    assert mean.value == pytest.approx(7.0, rel=1e-3)


def test_outlier_moves_a_mean_by_its_ratio_at_most() -> None:
    mean = Mean(memory=10)
    mean.add_cut(1.0, 1.1)
    mean.add_cut(100.0, 1.1)
    assert mean.value == pytest.approx(1.05)
    mean.add_cut(0.0, 1.1)
    assert mean.value >= 1.05 / 1.1


def test_prompt_tokens_weigh_as_many_as_they_are() -> None:
    predictor = Predictor()
    assert predictor.expected_s(8) == FIRST_STEP_S
    predictor.note([], 0.0, 1.0, num_prompt_tokens=100)
    predictor.note([], 1.0, 3.0, num_prompt_tokens=300)
    predictor.note([], 3.0, 3.5, num_prompt_tokens=0)
    assert predictor.prompt_token_s == pytest.approx(3.0 / 400)
    assert predictor.step_s == pytest.approx(3.5 / 3)


def test_a_stopped_process_says_little_of_the_next_step() -> None:
    predictor = Predictor()
    for step in range(10):
        predictor.note([], step * 0.1, step * 0.1 + 0.1, num_prompt_tokens=0)
    took_s = predictor.note([], 1.0, 3_601.0, num_prompt_tokens=0)
    assert took_s <= 1.3
