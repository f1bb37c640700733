"""A block with its header, as tiers keep it.

    magic 4 | 0 2 | bytes of key 2 | bytes of payload 8 | root 16 | key 64 | checksum of payload 4 | of header 4

Integers are little-endian, and a key is filled up with zeros. The checksum of the payload begins with the root, the key
and the length, so it also fails for the payload of another block. Together with the header's own checksum, a change
within 32 consecutive bits is always found, and any other with a probability of 1 − 2⁻³².
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from quire.tiers.checksum import crc32
from quire.tiers.store import MAX_KEY_BYTES

# The last character is the version of the layout.
_MAGIC = b"QKB1"
_FIELDS = struct.Struct("<4s2xHQ16s64sI")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class Header:
    """A header whose own checksum is right. ``checksum`` is the payload's."""

    key: bytes
    num_bytes: int
    checksum: int


def short_root(root: str) -> bytes:
    """Return the bytes that stand for a root in headers."""
    return blake2b(root.encode(), digest_size=16, person=b"quire.tier.root").digest()


def header_of(root: bytes, key: bytes, payload: Sequence[memoryview]) -> bytes:
    """Return the header of a block. ``root`` comes from `short_root`."""
    assert 0 < len(key) <= MAX_KEY_BYTES
    num_bytes = sum(part.nbytes for part in payload)
    checksum = _seed(root, key, num_bytes)
    for part in payload:
        checksum = crc32(part, checksum)
    head = _FIELDS.pack(_MAGIC, len(key), num_bytes, root, key, checksum)
    return head + _CHECKSUM.pack(crc32(head))


def read_header(root: bytes, data: bytes | bytearray | memoryview) -> Header | None:
    """Return the header that ``data`` begins with; None for anything else, another version or another root."""
    if len(data) < HEADER_BYTES:
        return None
    (own,) = _CHECKSUM.unpack_from(data, _FIELDS.size)
    magic, key_bytes, num_bytes, its_root, key, checksum = _FIELDS.unpack_from(data)
    if magic != _MAGIC or its_root != root or not 0 < key_bytes <= MAX_KEY_BYTES:
        return None
    if own != crc32(memoryview(data)[: _FIELDS.size]):
        return None
    return Header(key[:key_bytes], num_bytes, checksum)


def is_whole(root: bytes, key: bytes, header: bytes | bytearray | memoryview, payload: memoryview) -> bool:
    """Whether header and payload are those of the block that ``key`` names under ``root``."""
    found = read_header(root, header)
    if found is None or found.key != key or found.num_bytes != payload.nbytes:
        return False
    return found.checksum == crc32(payload, _seed(root, key, payload.nbytes))


def _seed(root: bytes, key: bytes, num_bytes: int) -> int:
    return crc32(root + key + num_bytes.to_bytes(8, "little"))
