"""Chain hashes: the names of cached blocks, the same in every process and on every machine.

    root     = H("quire.root.v1",  model_key, adapter, cache_salt, block_size)
    block i  = H("quire.block.v2", hash of block i − 1 (or root), the token ids of block i)
    page     = H("quire.page.v1",  hash of block i, index of the cache group)

H is BLAKE2b-256 over typed fields: each is written as a tag, its length and its bytes, so that no two different
lists of fields ever give the same input. A hash names everything that K and V of a block depend on: what computes
it (model, dtype, quantization, adapter content), which requests may share it (salt), and every token up to its end. A
token id is four bytes: with 16 of them a block is one round of BLAKE2b's compression, with eight bytes each it would be
two.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 32
_TOKEN_BYTES = 4
_ROOT = b"quire.root.v1"  # `person` of BLAKE2b: at most 16 bytes
_BLOCK = blake2b(digest_size=HASH_BYTES, person=b"quire.block.v2")  # copied, which is quicker than begun anew
_PAGE = b"quire.page.v1"


def root_hash(model_key: str, block_size: int, *, adapter: str = "", cache_salt: str = "") -> bytes:
    """Return the hash that all chains of one namespace start from."""
    fields = _text(model_key) + _text(adapter) + _text(cache_salt) + _integer(block_size)
    return blake2b(fields, digest_size=HASH_BYTES, person=_ROOT).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of a full block whose predecessor (or root) has the hash ``parent``."""
    assert len(parent) == HASH_BYTES
    chain: list[bytes] = []
    extend_chain(chain, parent, token_ids, len(token_ids))
    return chain[0]


def group_block_hash(block: bytes, group: int) -> bytes:
    """Return the name of a block's K and V of one cache group, for tiers and transfers."""
    return blake2b(block + _integer(group), digest_size=HASH_BYTES, person=_PAGE).digest()


def extend_chain(chain: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int) -> None:
    """Append to ``chain`` the hashes of the full blocks of ``token_ids`` that it does not have yet."""
    num_blocks = len(token_ids) // block_size
    if num_blocks <= len(chain):
        return
    parent = chain[-1] if chain else root
    data = _token_bytes(token_ids[len(chain) * block_size : num_blocks * block_size])
    width = block_size * _TOKEN_BYTES
    begin, add = _BLOCK.copy, chain.append
    for start in range(0, len(data), width):
        state = begin()
        state.update(parent + data[start : start + width])
        parent = state.digest()
        add(parent)


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    """Four bytes a token, little-endian."""
    words = array("I", token_ids)
    assert words.itemsize == _TOKEN_BYTES
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _text(value: str) -> bytes:
    data = value.encode("utf-8")
    return b"s" + struct.pack("<Q", len(data)) + data


def _integer(value: int) -> bytes:
    return b"i" + struct.pack("<Q", value)
