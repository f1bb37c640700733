"""Blocks for the tests of tiers: the content of each follows from its key, so that any wrong byte is seen."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from hashlib import blake2b, shake_128

from quire.tiers.store import BlockStore

ROOT = "0123456789abcdef"
OTHER_ROOT = "fedcba9876543210"
BLOCK_BYTES = 3000
MIB = 1 << 20


def key_of(number: int, chain: str = "") -> bytes:
    return blake2b(f"{chain}/{number}".encode(), digest_size=32).digest()


def keys_of(count: int, chain: str = "") -> list[bytes]:
    return [key_of(number, chain) for number in range(count)]


def content_of(key: bytes, num_bytes: int = BLOCK_BYTES) -> bytes:
    return shake_128(key).digest(num_bytes)


def parts_of(key: bytes, num_bytes: int = BLOCK_BYTES) -> list[memoryview]:
    """Return the content of a block as a writer gives it: in several pieces."""
    whole = memoryview(content_of(key, num_bytes))
    cuts = sorted({0, num_bytes, *(random.Random(key).randrange(num_bytes + 1) for _ in range(3))})
    return [whole[start:end] for start, end in itertools.pairwise(cuts)]


def write(store: BlockStore, keys: Sequence[bytes], num_bytes: int = BLOCK_BYTES) -> int:
    return store.write(keys, [parts_of(key, num_bytes) for key in keys])


def read(store: BlockStore, keys: Sequence[bytes], num_bytes: int = BLOCK_BYTES) -> int:
    """Read blocks, check each that the store says is whole, and return how many these are."""
    buffers = [bytearray(num_bytes) for _ in keys]
    count = store.read(keys, [memoryview(buffer) for buffer in buffers])
    assert 0 <= count <= len(keys)
    for key, buffer in zip(keys[:count], buffers, strict=False):
        assert bytes(buffer) == content_of(key, num_bytes), "the store returned a wrong block as a whole one"
    return count
