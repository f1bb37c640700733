"""The pool: what is handed out, in which order, and when it comes back."""

from __future__ import annotations

import random

import pytest
from tests.fakes.integrity import free_ids

from quire.cache.blocks import BlockPool


def test_untouched_blocks_are_taken_in_ascending_order() -> None:
    pool = BlockPool(4)
    assert [pool.take() for _ in range(4)] == [0, 1, 2, 3]
    assert pool.num_free == pool.num_untouched == 0


def test_used_blocks_come_before_untouched_ones() -> None:
    """Memory is touched only when it must be."""
    pool = BlockPool(8)
    first, second = pool.take(), pool.take()
    pool.drop(first)
    pool.drop(second)
    assert [pool.take(), pool.take()] == [second, first]
    assert pool.num_untouched == 6
    assert pool.take() == 2


def test_a_block_returns_with_its_last_reference() -> None:
    pool = BlockPool(1)
    block_id = pool.take()
    assert pool.share(block_id) == 2
    assert pool.drop(block_id) == 1
    assert pool.num_free == 0
    assert pool.drop(block_id) == 0
    assert pool.num_free == 1


def test_misuse_is_a_programmer_error() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError):
        pool.share(0)
    with pytest.raises(AssertionError):
        pool.drop(0)
    pool.take()
    with pytest.raises(AssertionError):
        pool.take()


@pytest.mark.parametrize("seed", range(5))
def test_the_free_list_agrees_with_a_set(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(17)
    counts: dict[int, int] = {}
    for _ in range(2000):
        if rng.random() < 0.5 and pool.num_free:
            block_id = pool.take()
            assert block_id not in counts, f"seed {seed}"
            counts[block_id] = 1
        elif counts:
            block_id = rng.choice(sorted(counts))
            if rng.random() < 0.4:
                counts[block_id] += 1
                pool.share(block_id)
            else:
                counts[block_id] -= 1
                pool.drop(block_id)
                if not counts[block_id]:
                    del counts[block_id]
        free = free_ids(pool)
        assert sorted(free) == sorted(set(range(17)) - counts.keys()), f"seed {seed}"
        assert len(free) == pool.num_free
