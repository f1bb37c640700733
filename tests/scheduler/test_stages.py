"""Chunks of a pipeline: the formula of bubbles finds the size that enumeration finds."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from quire.config import ARM_LEVELS, X86_LEVELS, row_tile
from quire.scheduler.policies.stages import STEP_ROWS, StageRows, prompt_room, stage_chunk, stage_rows


@pytest.mark.parametrize("num_stages", [2, 3, 8])
@pytest.mark.parametrize("num_tokens", [300, 512, 2048, 8192])
@pytest.mark.parametrize("rows", [STEP_ROWS, 40.0])
def test_chunk_is_as_soon_through_as_any(num_stages: int, num_tokens: int, rows: float) -> None:
    def seconds(chunk: int) -> float:
        return (math.ceil(num_tokens / chunk) + num_stages - 1) * (rows + chunk)

    for tile in (12, 16):
        best = min(map(seconds, range(tile, num_tokens + 1)))
        assert seconds(stage_chunk(num_tokens, num_stages, StageRows(rows, tile))) < 1.05 * best


def test_a_small_model_has_longer_chunks() -> None:
    assert stage_rows(1_236_000_000, 2, "amx").step == pytest.approx(STEP_ROWS, rel=0.05)
    assert stage_rows(6_700_000, 2, "amx").step > 30.0


@pytest.mark.parametrize(("kernels", "tile"), [("amx", 16), ("avx512", 12), ("avx2", 12), ("reference", 32)])
def test_a_step_of_a_pipeline_has_whole_tiles_of_rows(kernels: str, tile: int) -> None:
    rows = stage_rows(1_236_000_000, 2, kernels)
    assert rows.tile == tile
    for num_decodes in range(33):
        for num_tokens in (1, 100, 512, 10**6):
            left = prompt_room(2048 - num_decodes, 2048, num_decodes, num_tokens, 2, rows)
            assert (num_decodes + left) % tile == 0
            assert left <= 128


def test_row_tiles_are_those_of_the_kernels() -> None:
    sources = Path(__file__).resolve().parents[2] / "csrc" / "cpu"
    heights = [
        int(rows)
        for source in ("isa.h", "isa_neon.h", "int_vec.h", "int_vec_neon.h")
        for rows in re.findall(
            r"constexpr int (?:kRows|kChannelRows) = (\d+)", (sources / source).read_text()
        )
    ]
    assert len(heights) == 10
    vector_levels = {*X86_LEVELS, *ARM_LEVELS} - {"amx"}
    assert {row_tile(level) for level in vector_levels} == {12}
    assert all(12 % rows == 0 for rows in heights), heights
    amx = re.search(r"constexpr int kTileRows = (\d+)", (sources / "amx.h").read_text())
    assert amx is not None
    assert row_tile("amx") == int(amx[1])
