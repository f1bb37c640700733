"""`BlockStore`: what a tier of KV blocks has to offer, wherever it keeps them.

A block is the bytes of one KV block over all groups and layers of one rank, and a key names its content. The
engine has put everything into a key that the bits depend on; a store compares keys and never interprets them. A store
may lose any block at any time. It never returns bytes that differ from those that were written under a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Protocol

# Longest key in bytes: a hash, and what names the rank.
MAX_KEY_BYTES = blake2b.MAX_DIGEST_SIZE


class BlockStore(Protocol):
    """Blocks by key. All methods may be called from several threads; none raises for what the medium does."""

    # The tier, such as "disk".
    name: str

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys the store has, from memory alone. A block may be lost before it is read."""
        ...

    def kept(self, keys: Sequence[bytes]) -> int:
        """As `contains`, of the blocks that need not be written."""
        ...

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview], giver: str = "") -> int:
        """Fill one writable buffer of bytes per key; return how many leading blocks are whole and verified.

        ``giver``: the peer that may have blocks soon which are nowhere yet; other stores have no use for it.
        What the buffers after those hold is undefined. A block that is damaged, or that has another size than its
        buffer, is dropped from the store and counted.
        """
        ...

    def write(self, keys: Sequence[bytes], blocks: Sequence[Sequence[memoryview]]) -> int:
        """Keep blocks, each given as a list of buffers of bytes; return how many leading ones the store now has."""
        ...

    def counts(self) -> StoreCounts:
        """Return what this process has read, written and lost."""
        ...

    def close(self) -> None:
        """Give back files and connections. Later calls find nothing and keep nothing."""
        ...


@dataclass(slots=True)
class StoreCounts:
    """Sums since the store was opened, but the last two, which say what it has now. Bytes are those of blocks."""

    blocks_read: int = 0
    bytes_read: int = 0
    blocks_written: int = 0
    bytes_written: int = 0
    # Blocks whose key, size or checksum was not as expected.
    blocks_damaged: int = 0
    # Blocks that another process removed, or that the medium did not give.
    blocks_lost: int = 0
    read_errors: int = 0
    write_errors: int = 0
    # Blocks that were not written because there was no room for them.
    blocks_refused: int = 0
    blocks_evicted: int = 0
    # Everything written to the medium, with headers and tables.
    wear_bytes: int = 0
    num_blocks: int = 0
    size_bytes: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
