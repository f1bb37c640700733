"""Logits bit for bit: chunked = whole, in a batch = alone, shuffled pages = pages in order, resumed = continued."""

from __future__ import annotations

import random

import pytest
import torch
from tests.exact.suite import at_level
from tests.kernels.checks import assert_same_bits, threads
from tests.runner.tiny import SEED, SPECS, Driver, engine_config, prompt_of

from quire.kernels import registry
from quire.kernels.registry import NATIVE_LEVELS
from quire.step import KvMove

LENGTHS = {0: 75, 1: 1, 2: 33, 3: 64, 4: 17}
STEPS = 5

Logits = dict[tuple[int, int], torch.Tensor]


def alone(
    name: str, dtype: str, block_size: int = 16, isa: str = "reference"
) -> tuple[Logits, dict[int, list[int]]]:
    """Every sequence whole and alone, one after the other."""
    blocks = 2048 // block_size
    driver = Driver(engine_config(SPECS[name], dtype, block_size=block_size, num_blocks=blocks, isa=isa))
    for seq_id, length in LENGTHS.items():
        driver.add(seq_id, prompt_of(length, seq_id))
        driver.generate(seq_id, STEPS)
    return driver.logits, {seq_id: driver.seqs[seq_id].output for seq_id in LENGTHS}


def compare(actual: Logits, expected: Logits, what: str) -> None:
    assert expected.keys() <= actual.keys(), what
    for key, row in expected.items():
        assert_same_bits(actual[key], row, f"{what}: sequence {key[0]}, position {key[1]}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SPECS)
def test_ragged_batches_equal_alone(name: str, dtype: str) -> None:
    check_ragged_batches(name, dtype, "reference")


@pytest.mark.parametrize(
    "isa", [at_level(level) for level in registry.backends("linear") if level in NATIVE_LEVELS]
)
@pytest.mark.parametrize("name", SPECS)
def test_ragged_batches_equal_alone_natively(name: str, isa: str) -> None:
    check_ragged_batches(name, "bfloat16", isa)


def check_ragged_batches(name: str, dtype: str, isa: str) -> None:
    """All sequences together, prompts in random chunks beside decoding ones, pages in random order."""
    expected, tokens = alone(name, dtype, isa=isa)
    rng = random.Random(SEED)
    driver = Driver(engine_config(SPECS[name], dtype, isa=isa), shuffle=True)
    for seq_id, length in LENGTHS.items():
        driver.add(seq_id, prompt_of(length, seq_id))
    while any(len(driver.seqs[i].output) < STEPS for i in LENGTHS):
        chunks = []
        for seq_id in rng.sample(sorted(LENGTHS), rng.randint(1, len(LENGTHS))):
            known = driver.seqs[seq_id]
            left = len(known.prompt) + len(known.output) - known.computed
            if len(known.output) < STEPS:
                chunks.append((seq_id, rng.randint(1, min(left, rng.choice((1, 7, 40))))))
        if chunks:
            with threads(rng.choice((1, 2))):
                driver.step(*chunks)
    compare(driver.logits, expected, f"{name} {dtype} {isa}")
    assert {i: driver.seqs[i].output for i in LENGTHS} == tokens


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("name", SPECS)
def test_chunked_equals_whole(name: str, chunk: int) -> None:
    expected, _ = alone(name, "float32")
    driver = Driver(engine_config(SPECS[name]), shuffle=True)
    for seq_id in (0, 2):
        driver.add(seq_id, prompt_of(LENGTHS[seq_id], seq_id))
        driver.generate(seq_id, STEPS, chunk)
    compare(
        driver.logits, {key: row for key, row in expected.items() if key[0] in (0, 2)}, f"{name}, {chunk}"
    )


@pytest.mark.parametrize("name", SPECS)
def test_resumed_equals_continued(name: str) -> None:
    """Preempted after three tokens: the next epoch recomputes prompt and output, elsewhere, and goes on."""
    expected, tokens = alone(name, "bfloat16")
    driver = Driver(engine_config(SPECS[name], "bfloat16"))
    driver.add(0, prompt_of(LENGTHS[0], 0))
    output = driver.generate(0, 3)
    driver.drop(0)
    driver.free.reverse()
    driver.add(0, prompt_of(LENGTHS[0], 0), output, epoch=1)
    assert driver.generate(0, STEPS, chunk=30) == tokens[0]
    compare(driver.logits, {key: row for key, row in expected.items() if key[0] == 0}, name)


@pytest.mark.parametrize("name", SPECS)
def test_a_fork_with_a_copied_tail_equals_alone(name: str) -> None:
    """The sibling shares full blocks, gets a copy of the partial one, and computes the last prompt token itself."""
    expected, _ = alone(name, "float32")
    driver = Driver(engine_config(SPECS[name]))
    length = LENGTHS[0]
    first = driver.add(0, prompt_of(length, 0))
    driver.step((0, length - 1))
    sibling = driver.add(9, prompt_of(length, 0))
    for group, rows in enumerate(first.blocks):
        tail = driver.free.pop(0)
        driver.moves.append(KvMove(rows[-1], tail))
        sibling.blocks[group] = [*rows[:-1], tail]
    sibling.computed = length - 1
    driver.step((0, 1), (9, 1))
    assert_same_bits(driver.logits[0, length - 1], expected[0, length - 1], "the first")
    assert_same_bits(driver.logits[9, length - 1], expected[0, length - 1], "the sibling")


@pytest.mark.parametrize("block_size", [1, 8, 32, 128])
def test_other_block_sizes(block_size: int) -> None:
    """Within one block size; 128 holds two attention tiles."""
    expected, _ = alone("windows", "float32", block_size)
    config = engine_config(SPECS["windows"], block_size=block_size, num_blocks=2048 // block_size)
    driver = Driver(config, shuffle=True)
    for seq_id in (0, 2):
        driver.add(seq_id, prompt_of(LENGTHS[seq_id], seq_id))
    driver.step((0, 20), (2, 33))
    driver.step((0, 55), (2, 1))
    compare(
        driver.logits, {key: expected[key] for key in ((0, 74), (2, 32), (2, 33))}, f"blocks of {block_size}"
    )
