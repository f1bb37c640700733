"""Adapters of a GPU against fp64, in any batch, and in slots written anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.kernels import cases
from tests.kernels.checks import DTYPES, assert_close, assert_rows_independent, assert_same_bits
from tests.kernels.test_lora import make, oracle_of, rows_of, run
from tests.kernels.triton.device import DEVICE, WARNINGS

from quire.kernels.lora import LoraStack, group_rows, most_tiles, tiles_of, write_slot

pytestmark = WARNINGS
_TENSORS = ("a", "b", "ranks", "scales", "gained", "gains", "offsets")
CASES = [case for case in cases.LORA if not case.bench and case.in_features < 500]
SLOW = [case if case.in_features == 33 else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


def moved(stack: LoraStack) -> LoraStack:
    return replace(stack, **{name: getattr(stack, name).to(DEVICE) for name in _TENSORS})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_against_fp64(case: cases.LoraCase, dtype: torch.dtype) -> None:
    stack, adapters = make(case, dtype, "triton")
    x, y = rows_of(case, len(case.slots), dtype)
    oracle = oracle_of(case, adapters, x, y)
    got = run(moved(stack), x.to(DEVICE), y.to(DEVICE), np.array(case.slots, np.int64)).cpu()
    assert_close("lora", got, oracle)
    untouched = [row for row, slot in enumerate(case.slots) if slot == 0]
    assert_same_bits(got[untouched], y[untouched], "rows of the base model")


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.slots], ids=str)
def test_a_row_does_not_depend_on_the_batch(case: cases.LoraCase) -> None:
    stack = moved(make(case, torch.bfloat16, "triton")[0])
    x, y = (part.to(DEVICE) for part in rows_of(case, 37, torch.bfloat16))
    slots = np.resize(np.array(case.slots, np.int64), 37)
    assert_rows_independent(
        lambda ids: run(stack, x[ids], y[ids], slots[ids.numpy()]).cpu(), 37, str(case), (1, 7, 70)
    )


def test_a_slot_written_anew_forgets_what_it_held() -> None:
    case = replace(cases.LORA[4], slots=(1, 2, 3) * 3)
    stack, adapters = make(case, torch.bfloat16, "triton")
    x, y = (part.to(DEVICE) for part in rows_of(case, 9, torch.bfloat16))
    slots = np.array(case.slots, np.int64)
    write_slot(stack, 1, adapters[1])  # of higher rank, and without the first two parts
    there = moved(stack)
    same = run(there, x, y, np.where(slots == 1, 2, slots))
    assert_same_bits(run(there, x, y, slots).cpu(), same.cpu(), "slot 1 holds what slot 2 holds")


def test_a_graph_has_room_for_every_grouping() -> None:
    rng = np.random.default_rng(20261122)
    for _ in range(200):
        count, num_slots = int(rng.integers(0, 100)), int(rng.integers(1, 9))
        rows = group_rows(rng.integers(0, num_slots + 1, count), num_slots)
        tiles = tiles_of(rows)
        assert len(tiles) <= most_tiles(count, num_slots)
        found = [(slot + 1, row) for slot, first, stop in tiles for row in rows.order[first:stop].tolist()]
        expected = [
            (s, r) for s in range(1, num_slots + 1) for r in rows.order[rows.starts[s - 1] : rows.starts[s]]
        ]
        assert found == expected
