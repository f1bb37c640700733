"""Embedding rows and their scale."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.checks import DTYPES, assert_close, assert_same_bits, generator

from quire.kernels import cases
from quire.kernels.embedding import embedding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases.ROWS, ids=str)
def test_rows(case: cases.RowCase, dtype: torch.dtype) -> None:
    rng = generator()
    table = torch.randn(101, case.size, generator=rng).to(dtype)
    ids = torch.randint(101, (case.num_tokens,), generator=rng)
    before = table.clone()
    assert_same_bits(embedding(ids, table, 1.0), table[ids], "scale 1")
    scale = float(torch.tensor(case.size**0.5).to(dtype))  # rounded as the models do
    assert_close("embedding", embedding(ids, table, case.size**0.5), (table[ids] * scale).double())
    assert_same_bits(table, before, "the table")
