"""Adapters against fp64, and the claim that a row's bits depend on the row and its adapter alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.kernels import cases
from tests.kernels.checks import (
    DTYPES,
    assert_close,
    assert_rows_independent,
    assert_same_bits,
    each,
    generator,
)

from quire.kernels import registry
from quire.kernels.lora import LoraStack, LowRank, add_lora, group_rows, stack_empty, write_slot
from quire.kernels.registry import Backend
from quire.kernels.tape import StepTape

CASES = [case for case in cases.LORA if not case.bench]
Adapters = list[dict[int, LowRank]]


def make(case: cases.LoraCase, dtype: torch.dtype, backend: Backend) -> tuple[LoraStack, Adapters]:
    rng = generator()
    highest = max(max(ranks) for ranks in case.ranks)
    stack = stack_empty(case.widths, case.in_features, len(case.ranks), highest, dtype, backend=backend)
    adapters = []
    for slot, ranks in enumerate(case.ranks, 1):
        parts = {
            part: LowRank(
                torch.randn(rank, case.in_features, generator=rng).to(dtype),
                torch.randn(width, rank, generator=rng).to(dtype),
                0.25 + part,
                *(torch.randn(2, width, generator=rng) if case.dora and (slot + part) % 2 else ()),
            )
            for part, (rank, width) in enumerate(zip(ranks, case.widths, strict=True))
            if rank
        }
        write_slot(stack, slot, parts)
        adapters.append(parts)
    return stack, adapters


def rows_of(case: cases.LoraCase, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rng = generator(3)
    x = torch.randn(count, case.in_features, generator=rng).to(dtype)
    return x, torch.randn(count, sum(case.widths), generator=rng).to(dtype)


def run(stack: LoraStack, x: torch.Tensor, y: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
    y = y.clone()
    add_lora(x, y, stack, group_rows(slots, stack.num_slots))
    return y


def oracle_of(case: cases.LoraCase, adapters: Adapters, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``y`` with what each row's adapter adds, in fp64."""
    oracle = y.double()
    for row, slot in enumerate(case.slots):
        for part, low in adapters[slot - 1].items() if slot else ():
            start = sum(case.widths[:part])
            columns = slice(start, start + case.widths[part])
            if low.gain is not None:
                assert low.offset is not None
                oracle[row, columns] = oracle[row, columns] * low.gain + low.offset
            oracle[row, columns] += low.b.double() @ (low.a.double() @ x[row].double()) * low.scale
    return oracle


@each("backend", registry.backends("lora"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_fp64(case: cases.LoraCase, dtype: torch.dtype, backend: Backend) -> None:
    stack, adapters = make(case, dtype, backend)
    x, y = rows_of(case, len(case.slots), dtype)
    oracle = oracle_of(case, adapters, x, y)
    got = run(stack, x, y, np.array(case.slots, np.int64))
    assert_close("lora", got, oracle)
    untouched = [row for row, slot in enumerate(case.slots) if slot == 0]
    assert_same_bits(got[untouched], y[untouched], "rows of the base model")


@each("backend", registry.backends("lora"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [case for case in CASES if case.slots], ids=str)
def test_a_row_does_not_depend_on_the_batch(
    case: cases.LoraCase, dtype: torch.dtype, backend: Backend
) -> None:
    stack, _ = make(case, dtype, backend)
    x, y = rows_of(case, 37, dtype)
    slots = np.resize(np.array(case.slots, np.int64), 37)
    assert_rows_independent(
        lambda ids: run(stack, x[ids], y[ids], slots[ids.numpy()]), 37, str(case), (1, 7, 70)
    )


@each("backend", registry.backends("lora"))
def test_a_slot_written_anew_forgets_what_it_held(backend: Backend) -> None:
    case = replace(cases.LORA[4], slots=(1, 2, 3) * 3)
    stack, adapters = make(case, torch.bfloat16, backend)
    x, y = rows_of(case, 9, torch.bfloat16)
    slots = np.array(case.slots, np.int64)
    write_slot(stack, 1, adapters[1])  # of higher rank, and without the first two parts
    moved = run(stack, x, y, slots)
    same = run(stack, x, y, np.where(slots == 1, 2, slots))
    assert_same_bits(moved, same, "slot 1 holds what slot 2 holds")
    write_slot(stack, 1, {})
    assert_same_bits(run(stack, x[:1], y[:1], slots[:1]), y[:1], "an empty slot")


@each("backend", [level for level in registry.backends("lora") if level != "reference"])
def test_replayed_from_a_tape(backend: Backend) -> None:
    """Grouping, rows and slots are read at each replay, from the memory of the recording."""
    case = cases.LORA[4]
    stack, adapters = make(case, torch.bfloat16, backend)
    x, y = rows_of(case, 12, torch.bfloat16)
    rows = group_rows(np.zeros(12, np.int64), stack.num_slots)
    start = y.clone()

    def forward() -> torch.Tensor:
        add_lora(x, y, stack, rows)
        return y

    tape = StepTape(forward, 12, 5)
    assert len(tape) == 1
    rng = np.random.default_rng(7)
    for count in (12, 3, 0, 7):
        slots = rng.integers(0, stack.num_slots + 1, count)
        write_slot(stack, 2, adapters[int(rng.integers(3))])
        y.copy_(start)
        rows.group(slots)
        tape.run(count, 0)
        assert_same_bits(y[:count], run(stack, x[:count], start[:count], slots), f"{count} rows")
        assert_same_bits(y[count:], start[count:], "rows beyond the step's")
