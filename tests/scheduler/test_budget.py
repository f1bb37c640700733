"""Chunks of a pipeline: the formula of bubbles finds the size that enumeration finds."""

from __future__ import annotations

import math

import pytest

from quire.config import SchedulerConfig
from quire.scheduler.budget import ROW_TILE, STEP_ROWS, Budget, stage_chunk, step_rows


@pytest.mark.parametrize("num_stages", [2, 3, 8])
@pytest.mark.parametrize("num_tokens", [300, 512, 2048, 8192])
@pytest.mark.parametrize("rows", [STEP_ROWS, 40.0])
def test_chunk_is_as_soon_through_as_any(num_stages: int, num_tokens: int, rows: float) -> None:
    def seconds(chunk: int) -> float:
        return (math.ceil(num_tokens / chunk) + num_stages - 1) * (rows + chunk)

    best = min(map(seconds, range(ROW_TILE, num_tokens + 1)))
    assert seconds(stage_chunk(num_tokens, num_stages, rows)) < 1.05 * best


def test_a_small_model_has_longer_chunks() -> None:
    assert step_rows(1_236_000_000, 2) == pytest.approx(STEP_ROWS, rel=0.05)
    assert step_rows(6_700_000, 2) > 30.0


def test_a_step_of_a_pipeline_has_whole_tiles_of_rows() -> None:
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=4096)
    for num_decodes in range(33):
        for num_tokens in (1, 100, 512, 10**6):
            budget = Budget(config, 2)
            budget.take_decodes(num_decodes, num_tokens)
            assert (num_decodes + budget.left) % ROW_TILE == 0
            assert budget.left <= 128


def test_one_process_takes_all_that_is_left() -> None:
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=4096)
    budget = Budget(config)
    budget.take_decodes(5, 10**6)
    assert budget.left == 2043
