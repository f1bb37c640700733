"""Files of packed weights: what is written is read, and whatever happened to a file in between is found."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

from quire.models import packed_file
from quire.models.packed_file import Region, Unusable, entries, make_room, read, write

native = pytest.importorskip("quire._native")
SEED = 20261123
KEY = "c0ffee"
MIB = 1 << 20


def memory(sizes: list[int], seed: int | None = None) -> list[np.ndarray]:
    """Arrays of ``sizes`` bytes: random ones, or zeros."""
    rng = np.random.default_rng(seed)
    return [np.zeros(n, np.uint8) if seed is None else rng.integers(0, 256, n, np.uint8) for n in sizes]


KEPT: list[list[np.ndarray]] = []  # regions do not keep their memory


def regions(arrays: list[np.ndarray]) -> list[Region]:
    KEPT[:] = [*KEPT[-8:], arrays]
    return [Region(array.ctypes.data, array.nbytes) for array in arrays]


def always() -> bool:
    return True


def written(folder: Path, arrays: list[np.ndarray], key: str = KEY) -> Path:
    path = folder / f"{key}.packed"
    assert write(path, key, regions(arrays), always, always)
    assert [each.name for each in folder.iterdir()] == [path.name]
    return path


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_what_was_written_is_read(tmp_path: Path, num_threads: int) -> None:
    rng = random.Random(SEED)
    sizes = [1, 3 * MIB, MIB, 4095, 4096, MIB + 1, *(rng.randrange(1, 9_000_000) for _ in range(4))]
    source, target = memory(sizes, SEED), memory(sizes)
    read(written(tmp_path, source), KEY, regions(target), num_threads)
    for a, b in zip(source, target, strict=True):
        assert np.array_equal(a, b), f"{sizes} (seed {SEED})"


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path) -> None:
    """But between the parts, where nothing is read."""
    sizes = [5000, MIB + 77, 64]
    path = written(tmp_path, memory(sizes, SEED))
    whole, rng = path.read_bytes(), random.Random(SEED)
    header = 16 + int.from_bytes(whole[8:16], "little")
    starts = [4096, 12288, 12288 + 257 * 4096]
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    used = [
        *range(header),
        *(rng.randrange(a, b) for a, b in zip(starts, ends, strict=True) for _ in range(60)),
    ]
    used += [starts[0], ends[0] - 1, starts[1] + MIB, ends[1] - 1, *range(ends[2], len(whole))]
    for at in used:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(Unusable):
            read(path, KEY, regions(memory(sizes)), 2)
    path.write_bytes(whole)
    read(path, KEY, regions(memory(sizes)), 2)


def test_a_file_of_another_length_is_not_used(tmp_path: Path) -> None:
    sizes = [70_000, 2 * MIB]
    path = written(tmp_path, memory(sizes, SEED))
    whole, rng = path.read_bytes(), random.Random(SEED)
    for end in (
        0,
        7,
        8,
        16,
        4096,
        len(whole) - 8,
        len(whole) - 1,
        *(rng.randrange(len(whole)) for _ in range(20)),
    ):
        path.write_bytes(whole[:end])
        with pytest.raises(Unusable):
            read(path, KEY, regions(memory(sizes)), 2)
    path.write_bytes(whole + b"\0")
    with pytest.raises(Unusable):
        read(path, KEY, regions(memory(sizes)), 2)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [4 * MIB]
    path, preadv = written(tmp_path, memory(sizes, SEED)), os.preadv

    def shrink(fd: int, buffers: list[memoryview], offset: int) -> int:
        os.truncate(path, 2 * MIB)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", shrink)
    with pytest.raises(Unusable, match="ends at byte"):
        read(path, KEY, regions(memory(sizes)), 1)


def test_another_key_or_shape_is_not_used(tmp_path: Path) -> None:
    path = written(tmp_path, memory([4096, 4096], SEED))
    for key, sizes in (("c0ffef", [4096, 4096]), (KEY, [4096]), (KEY, [4095, 4096]), (KEY, [8192])):
        with pytest.raises(Unusable):
            read(path, key, regions(memory(sizes)), 1)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.packed", KEY, regions(memory([4096])), 1)
    path.unlink()
    path.mkdir()
    with pytest.raises(Unusable):
        read(path, KEY, regions(memory([4096, 4096])), 1)


KILLED = textwrap.dedent("""
    import os, signal, sys
    from pathlib import Path
    from tests.models.test_packed_file import KEY, MIB, SEED, always, memory, regions
    from quire.models.packed_file import write
    left = int(sys.argv[2])
    def may_write():
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return True
    write(Path(sys.argv[1]), KEY, regions(memory([5 * MIB], SEED)), may_write, always)
""")


@pytest.mark.parametrize("num_pieces", [0, 3])
def test_a_killed_writer_leaves_no_file_and_no_lock(tmp_path: Path, num_pieces: int) -> None:
    path = tmp_path / f"{KEY}.packed"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), str(num_pieces)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [each.name for each in tmp_path.iterdir()] == [f"{KEY}.part"]
    source, target = memory([5 * MIB], SEED + 1), memory([5 * MIB])
    read(written(tmp_path, source), KEY, regions(target), 2)
    assert np.array_equal(source[0], target[0])


def test_of_two_writers_at_once_one_writes(tmp_path: Path) -> None:
    path, source, target = tmp_path / f"{KEY}.packed", memory([3 * MIB], SEED), memory([3 * MIB])
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> bool:
        begun.set()
        return go_on.wait(60)

    first = threading.Thread(target=write, args=(path, KEY, regions(source), wait, always))
    first.start()
    assert begun.wait(60)
    assert not write(path, KEY, regions(memory([3 * MIB], SEED + 1)), always, always)
    make_room(tmp_path, 0, 1 << 40)  # removes what killed writers left, and not this
    go_on.set()
    first.join()
    read(path, KEY, regions(target), 1)
    assert np.array_equal(source[0], target[0])


def test_what_may_not_be_kept_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / f"{KEY}.packed"
    pieces = iter([True, False])
    assert not write(path, KEY, regions(memory([3 * MIB], SEED)), lambda: next(pieces), always)
    assert not write(path, KEY, regions(memory([3 * MIB], SEED)), always, lambda: False)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, pwrite, calls = tmp_path / f"{KEY}.packed", os.pwrite, iter(range(99))

    def full(fd: int, data: bytes, offset: int) -> int:
        if next(calls) < 3:
            return pwrite(fd, data[:100_000], offset)  # and a write may be short
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        write(path, KEY, regions(memory([3 * MIB], SEED)), always, always)
    assert not list(tmp_path.iterdir())


def test_room_is_made_by_the_least_recently_used(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.packed").write_bytes(bytes(100))
        os.utime(tmp_path / f"{number}.packed", (0, [30, 10, 40, 20][number]))
    (tmp_path / "killed.part").write_bytes(bytes(100))
    (tmp_path / "other.txt").write_bytes(bytes(100))
    assert [entry.path.stem for entry in entries(tmp_path)] == ["1", "3", "0", "2"]
    make_room(tmp_path, 100, 500)
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"{n}.packed" for n in range(4)] + [
        "other.txt"
    ]
    make_room(tmp_path, 150, 350)
    assert [entry.path.stem for entry in entries(tmp_path)] == ["0", "2"]
    assert entries(tmp_path / "none") == []
    make_room(tmp_path / "none", 1, 1)


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import quire.models.packed_file, quire.models.fingerprint"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


P1, P2, P3, P4, P5 = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
)  # fmt: skip
MASK = 2**64 - 1


def slow_sum(data: bytes) -> int:
    """XXH64 with seed 0, by doc/xxhash_spec.md."""

    def rotl(x: int, n: int) -> int:
        return (x << n | x >> 64 - n) & MASK

    def rounded(lane: int, word: int) -> int:
        return rotl((lane + word * P2) & MASK, 31) * P1 & MASK

    def word(at: int, size: int) -> int:
        return int.from_bytes(data[at : at + size], "little")

    at, total = 0, P5
    if len(data) >= 32:
        lanes = [(P1 + P2) & MASK, P2, 0, -P1 & MASK]
        while len(data) - at >= 32:
            lanes = [rounded(lane, word(at + 8 * i, 8)) for i, lane in enumerate(lanes)]
            at += 32
        total = sum(rotl(lane, n) for lane, n in zip(lanes, (1, 7, 12, 18), strict=True)) & MASK
        for lane in lanes:
            total = ((total ^ rounded(0, lane)) * P1 + P4) & MASK
    total = (total + len(data)) & MASK
    while len(data) - at >= 8:
        total = (rotl(total ^ rounded(0, word(at, 8)), 27) * P1 + P4) & MASK
        at += 8
    if len(data) - at >= 4:
        total = (rotl(total ^ word(at, 4) * P1 & MASK, 23) * P2 + P3) & MASK
        at += 4
    for byte in data[at:]:
        total = rotl(total ^ byte * P5 & MASK, 11) * P1 & MASK
    total = (total ^ total >> 33) * P2 & MASK
    total = (total ^ total >> 29) * P3 & MASK
    return total ^ total >> 32


def test_checksums_are_those_of_the_specification() -> None:
    for text, expected in (
        (b"", 0xEF46DB3751D8E999),
        (b"a", 0xD24EC4F1A98C6E5B),
        (b"abc", 0x44BC2CF5AD770999),
    ):
        assert packed_file._sum_of(text) == slow_sum(text) == expected
    rng = random.Random(SEED)
    for size in (*range(1, 80), 1000, 4096, 65_537):
        data = rng.randbytes(size)
        assert packed_file._sum_of(data) == slow_sum(data), f"{size} bytes (seed {SEED})"
