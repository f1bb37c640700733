"""Chain hashes: stable, and different for everything that K and V depend on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from quire.cache.prefix_cache import block_hash, extend_chain, group_block_hash, root_hash

TOKENS = (1, 2, 3, 4)


def test_the_hash_is_the_same_for_ever() -> None:
    """Other processes, machines and versions store blocks under these names."""
    root = root_hash("model", 4, adapter="a", cache_salt="s")
    assert root.hex() == "dd278b94923a35c82bdb22e6833028e7c4e49ceec195b9b688aa3ec803a51f89"
    assert (
        block_hash(root, TOKENS).hex() == "98321d8aa4a3db448ccfff005c143910a9b2ff176cba5fb62e5c185e9941d03b"
    )
    assert (
        group_block_hash(block_hash(root, TOKENS), 1).hex()
        == "185e97fe89437961e75ba199ba98c1bda3db4de063159867d124e5c10d90433b"
    )


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_the_hash_does_not_depend_on_the_process(hash_seed: str) -> None:
    code = "from quire.cache.prefix_cache import *; print(block_hash(root_hash('m', 16), range(16)).hex())"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == block_hash(root_hash("m", 16), range(16)).hex()


def test_every_field_of_the_namespace_counts() -> None:
    roots = {
        root_hash("m", 16),
        root_hash("m2", 16),
        root_hash("m", 32),
        root_hash("m", 16, adapter="x"),
        root_hash("m", 16, cache_salt="x"),
        root_hash("mx", 16),
        root_hash("m", 16, adapter="x", cache_salt="x"),
        root_hash("", 16, adapter="m"),
    }
    assert len(roots) == 8


def test_fields_do_not_run_into_each_other() -> None:
    assert root_hash("ab", 16, adapter="c") != root_hash("a", 16, adapter="bc")
    assert root_hash("m", 16, adapter="xy") != root_hash("m", 16, adapter="x", cache_salt="y")


def test_a_block_depends_on_all_before_it() -> None:
    root = root_hash("m", 4)
    first, other = block_hash(root, (1, 2, 3, 4)), block_hash(root, (1, 2, 3, 5))
    assert first != other
    assert block_hash(first, TOKENS) != block_hash(other, TOKENS)
    assert block_hash(first, TOKENS) != block_hash(root, TOKENS)


def test_pages_of_groups_have_names_of_their_own() -> None:
    block = block_hash(root_hash("m", 4), TOKENS)
    assert len({group_block_hash(block, 0), group_block_hash(block, 1), block}) == 3


def test_a_chain_grows_by_full_blocks_only() -> None:
    root = root_hash("m", 4)
    chain: list[bytes] = []
    extend_chain(chain, root, range(7), 4)
    assert chain == [block_hash(root, range(4))]
    extend_chain(chain, root, range(12), 4)
    whole: list[bytes] = []
    extend_chain(whole, root, range(12), 4)
    assert chain == whole
    assert len(chain) == 3
