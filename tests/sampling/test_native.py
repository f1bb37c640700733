"""The native sampling ops give what the reference gives, bit for bit, at every level and with any number of threads."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tests.kernels.checks import threads
from tests.sampling.test_noise import streams

from quire.kernels import registry
from quire.kernels.registry import Backend
from quire.kernels.sampling import COLUMNS, MIN_P, RANDOM, TRUNCATED, sample
from quire.kernels.sampling.logprobs import token_logprobs

LEVELS = [level for level in registry.backends("sample") if level != "reference"]
pytestmark = pytest.mark.skipif(not LEVELS, reason="no native version here")


def logits_of(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Rows of every kind: spread, flat, with equal values, with forbidden ids, all forbidden, NaN, infinite."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 4
    logits[1::5] *= 0.05
    logits[2::5] = logits[2::5].to(torch.bfloat16).float()
    logits[3::5, : vocab // 2] = -torch.inf
    logits[4::5] = logits[4::5].round()
    for row, value in ((7, torch.nan), (11, torch.inf)):
        if row < rows:
            logits[row, vocab // 3] = value
    if rows > 13:
        logits[13] = -torch.inf
    return logits


def columns_of(rows: int, vocab: int, seed: int) -> np.ndarray:
    rng = random.Random(seed)
    columns = np.zeros(rows, COLUMNS)
    for row in columns:
        row["features"] = rng.choice([0, RANDOM, RANDOM, RANDOM | TRUNCATED, RANDOM | TRUNCATED])
        row["temperature"] = rng.choice(
            [1.0, 1.0, 0.3, 0.8, 3.0, 1e-30, float(np.finfo(np.float32).tiny), 1e30]
        )
        row["top_k"], row["top_p"] = vocab, 1.0
        if row["features"] & TRUNCATED:
            top_k = rng.choice([vocab, 1, 5, 50, vocab - 1, vocab // 2])
            row["top_k"] = top_k if 0 < top_k < vocab else vocab
            row["top_p"] = rng.choice([1.0, 0.05, 0.5, 0.9, 0.9999])
        if row["features"] & RANDOM and rng.random() < 0.3:
            row["features"] |= MIN_P
            row["min_p"] = rng.choice([1e-4, 0.02, 0.3, 1.0])
    draws = streams(rows, seed)
    for name, values in zip(("seed", "sample_index", "position"), draws[:3], strict=True):
        columns[name] = values.numpy()
    return columns


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vocab", [1, 2, 5, 63, 64, 331, 8192, 8193, 20_011])
def test_the_same_tokens_as_the_reference(vocab: int, level: Backend) -> None:
    rows = 60
    logits, columns = logits_of(rows, vocab, vocab), columns_of(rows, vocab, vocab + 1)
    edited = {row: logits[(row + 5) % rows].clone() for row in (0, 9, 33)}
    ids, best = sample.on("reference")(logits, edited, columns, purpose=0)
    for count in (1, 2, 3):
        with threads(count):
            found, largest = sample.on(level)(logits, edited, columns, purpose=0)
        assert np.array_equal(best, largest, equal_nan=True), f"{count} threads"
        valid = np.isfinite(best)
        wrong = np.flatnonzero((ids != found) & valid)
        assert not wrong.size, f"{count} threads, {wrong}: {columns[wrong]} {ids[wrong]} {found[wrong]}"


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_alone_and_in_a_batch(level: Backend) -> None:
    logits, columns = logits_of(40, 9001, 3), columns_of(40, 9001, 4)
    ids, best = sample.on(level)(logits, {}, columns, purpose=1)
    wide = torch.empty(40, 9100)[:, :9001]
    wide.copy_(logits)
    for row in np.flatnonzero(np.isfinite(best)).tolist():
        part = slice(row, row + 1)
        alone, _ = sample.on(level)(wide[part], {}, columns[part], purpose=1)
        assert alone[0] == ids[row]


@pytest.mark.parametrize("level", LEVELS)
def test_a_wide_nucleus_of_flat_scores(level: Backend) -> None:
    """More ids than the first candidates, so the search widens."""
    logits = torch.randn(4, 30_000, generator=torch.Generator().manual_seed(8)) * 0.1
    columns = columns_of(4, 30_000, 9)
    columns["features"], columns["temperature"], columns["top_k"] = RANDOM | TRUNCATED, 1.0, 30_000
    columns["top_p"] = (0.3, 0.9, 0.999, 1 - 1e-16)
    expected, _ = sample.on("reference")(logits, {}, columns, purpose=0)
    found, _ = sample.on(level)(logits, {}, columns, purpose=0)
    assert expected.tolist() == found.tolist()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vocab", [1, 2, 63, 331, 20_011])
def test_the_same_logprobs_as_the_reference(vocab: int, level: Backend) -> None:
    logits = logits_of(7, vocab, vocab)
    logits[3] = logits[4]  # without infinities: which ids stand for those is left open
    chosen = torch.randint(0, vocab, (7,), generator=torch.Generator().manual_seed(vocab))
    num_top = [0, 1, 20, 3, 7, 2, 5]
    expected = token_logprobs(logits, chosen, num_top)
    for count in (1, 2, 3):
        with threads(count):
            assert token_logprobs.on(level)(logits, chosen, num_top) == expected
