"""A segment that was changed or cut anywhere never gives a wrong block, and loses no more than it must."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.tiers.blocks import MIB, ROOT, keys_of, read, write

from quire.tiers.disk import DiskStore
from quire.tiers.record import HEADER_BYTES
from quire.tiers.segment import HEAD_BYTES, SUFFIX

OpenStore = Callable[..., DiskStore]
SIZE = 97  # of a block
KEYS = keys_of(4)
ENDS = [HEAD_BYTES + (index + 1) * (HEADER_BYTES + SIZE) for index in range(len(KEYS))]


class Segment(NamedTuple):
    path: Path
    data: bytes


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Segment:
    """Return a segment with a table."""
    return _segment(tmp_path_factory.mktemp("sealed"), seals=True)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Segment:
    """Return a segment as a killed writer leaves it: no table, and room reserved behind its blocks."""
    return _segment(tmp_path_factory.mktemp("killed"), seals=False)


def _segment(folder: Path, seals: bool) -> Segment:
    with closing(DiskStore(folder / "kv", 16_384, ROOT, refreshes=False)) as store:
        assert write(store, KEYS, SIZE) == len(KEYS)
        if seals:
            store.close()
        (path,) = folder.rglob(f"*{SUFFIX}")
        data = path.read_bytes()
    return Segment(path, data)


def blocks_left(path: Path, data: bytes) -> list[bool]:
    """Put ``data`` where the segment is, and return which blocks a new store reads from it; none may be wrong."""
    for each in path.parent.glob("*"):
        each.unlink()
    path.write_bytes(data)
    folder = path.parent.parent
    with closing(DiskStore(folder, MIB, ROOT, refreshes=False)) as store:
        return [read(store, [key], SIZE) == 1 for key in KEYS]


def test_undamaged_segments_are_read(sealed: Segment, killed: Segment) -> None:
    for segment in (sealed, killed):
        assert blocks_left(*segment) == [True] * len(KEYS)


def test_one_changed_byte_costs_a_sealed_segment_one_block(sealed: Segment) -> None:
    data, seed = sealed.data, random.randrange(2**32)
    dice = random.Random(seed)
    for offset in range(len(data)):
        changed = bytearray(data)
        changed[offset] ^= 1 << dice.randrange(8)
        left = blocks_left(sealed.path, bytes(changed))
        expected = [not start <= offset < end for start, end in zip([HEAD_BYTES, *ENDS], ENDS, strict=False)]
        assert left == expected, f"byte {offset}, seed {seed}"


def test_one_changed_byte_costs_a_killed_segment_what_follows(killed: Segment) -> None:
    data, seed = killed.data, random.randrange(2**32)
    dice = random.Random(seed)
    for offset in range(ENDS[-1] + 8):
        changed = bytearray(data)
        changed[offset] ^= 1 << dice.randrange(8)
        left = blocks_left(killed.path, bytes(changed))
        whole = [offset < HEAD_BYTES or end <= offset for end in ENDS]
        assert all(kept for kept, must in zip(left, whole, strict=True) if must), (
            f"byte {offset}, seed {seed}"
        )
        assert left[sum(whole) + 1 :] in ([True] * (3 - sum(whole)), [False] * (3 - sum(whole)))


def test_a_cut_segment_has_the_blocks_before_the_cut(sealed: Segment, killed: Segment) -> None:
    for path, data in (sealed, killed):
        for length in range(ENDS[-1] + 200):
            expected = [end <= length for end in ENDS] if length >= HEAD_BYTES else [False] * len(KEYS)
            assert blocks_left(path, data[:length]) == expected, f"cut to {length} bytes"


@st.composite
def damages(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    kinds = st.sampled_from(["flip", "zero", "copy", "cut", "insert", "swap"])
    places = st.integers(0, 2**16)
    return draw(st.lists(st.tuples(kinds, places, places, st.integers(1, 300)), min_size=1, max_size=6))


def damaged(data: bytes, damage: list[tuple[str, int, int, int]]) -> bytes:
    out = bytearray(data)
    for kind, first, second, length in damage:
        a, b = first % max(1, len(out)), second % max(1, len(out))
        if kind == "flip" and out:
            out[a] ^= length & 0xFF
        elif kind == "zero":
            out[a : a + length] = bytes(len(out[a : a + length]))
        elif kind == "copy":
            out[a : a + length] = out[b : b + length]
        elif kind == "cut":
            del out[a : a + length]
        elif kind == "insert":
            out[a:a] = out[b : b + length]
        else:
            out[a : a + length], out[b : b + length] = out[b : b + length], out[a : a + length]
    return bytes(out)


@settings(max_examples=600, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
@given(damage=damages(), of_sealed=st.booleans())
def test_no_damage_gives_a_wrong_block(
    sealed: Segment, killed: Segment, damage: list[tuple[str, int, int, int]], of_sealed: bool
) -> None:
    segment = sealed if of_sealed else killed
    blocks_left(segment.path, damaged(segment.data, damage))


@settings(max_examples=200, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
@given(damage=damages())
def test_no_damage_under_an_open_store_gives_a_wrong_block(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[str, int, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("open")
    with closing(DiskStore(folder / "kv", MIB, ROOT, refreshes=False)) as store:
        write(store, KEYS, SIZE)
        (path,) = folder.rglob(f"*{SUFFIX}")
        path.write_bytes(damaged(path.read_bytes()[: ENDS[-1]], damage))
        for key in KEYS:
            read(store, [key], SIZE)
        first = read(store, KEYS, SIZE)
        write(store, KEYS, SIZE)
        assert read(store, KEYS, SIZE) >= first, "what was damaged is written anew"


def test_a_damaged_block_is_counted_and_written_again(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    write(store, KEYS, SIZE)
    (path,) = tmp_path.rglob(f"*{SUFFIX}")
    with path.open("r+b") as file:
        file.seek(ENDS[1] - 1)
        byte = file.read(1)
        file.seek(ENDS[1] - 1)
        file.write(bytes([byte[0] ^ 1]))
    assert read(store, KEYS, SIZE) == 1
    assert store.counts().blocks_damaged == 1
    assert store.contains(KEYS) == 1
    assert store.contains(KEYS[2:]) == 2
    assert write(store, KEYS, SIZE) == read(store, KEYS, SIZE) == 4
    assert store.counts().blocks_written == 5
