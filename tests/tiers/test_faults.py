"""Random traffic through a store with every kind of fault: no wrong block, and no lock or file that stays behind."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest
from tests.fakes.faulty_store import FAULTS, FaultyStore
from tests.tiers.blocks import MIB, ROOT, content_of, keys_of, parts_of, read, write

NUM_BYTES = 5_000


@pytest.mark.parametrize("_", range(3))
def test_no_fault_gives_a_wrong_block(tmp_path: Path, _: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice, waits = random.Random(seed), Counter[float]()
    store = FaultyStore(
        tmp_path,
        4 * MIB,
        ROOT,
        rates=dict.fromkeys(FAULTS, 0.03),
        seed=seed,
        wait=lambda s: waits.update([s]),
    )
    files = len(os.listdir("/proc/self/fd"))
    num_read = 0
    for _ in range(1500):
        keys = keys_of(dice.randrange(1, 20), f"chain {dice.randrange(30)}")
        try:
            store.contains(keys)
            if dice.random() < 0.5:
                assert write(store, keys, NUM_BYTES) <= len(keys)
            num_read += read(store, keys, NUM_BYTES)
        except OSError:
            assert store.seen["raises"], f"seed {seed}"
    assert store.seen.keys() == set(FAULTS), f"seed {seed}"
    assert num_read > 1000, f"seed {seed}"
    assert waits
    assert len(os.listdir("/proc/self/fd")) < files + 20, f"seed {seed}"
    store.close()
    assert len(os.listdir("/proc/self/fd")) <= files, f"seed {seed}"


def test_without_rates_it_is_a_plain_store(tmp_path: Path) -> None:
    store = FaultyStore(tmp_path, 4 * MIB, ROOT, rates={}, seed=0, wait=lambda s: None)
    keys = keys_of(5)
    assert write(store, keys, NUM_BYTES) == store.contains(keys) == read(store, keys, NUM_BYTES) == 5
    assert not store.seen
    store.close()


def test_buffers_after_the_last_whole_block_are_spoiled(tmp_path: Path) -> None:
    store = FaultyStore(tmp_path, 4 * MIB, ROOT, rates={"read-loss": 1.0}, seed=3, wait=lambda s: None)
    keys = keys_of(8)
    store.write(keys, [parts_of(key, NUM_BYTES) for key in keys])
    buffers = [bytearray(NUM_BYTES) for _ in keys]
    count = store.read(keys, [memoryview(buffer) for buffer in buffers])
    assert count < 8
    assert [
        bytes(buffer) == content_of(key, NUM_BYTES) for key, buffer in zip(keys, buffers, strict=True)
    ] == [index < count for index in range(8)]
    store.close()
