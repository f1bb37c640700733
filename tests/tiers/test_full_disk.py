"""A disk that is full, may only be read, or is taken away: fewer blocks, never a wrong one, and no exception."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.tiers.blocks import MIB, keys_of, read, write

from quire.clock import VirtualClock
from quire.tiers.disk import REFRESH_S, DiskStore
from quire.tiers.segment import SUFFIX

OpenStore = Callable[..., DiskStore]
NUM_BYTES = 20_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of 4 MiB of its own."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "quire-test", str(path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user may not mount")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_is_used_as_far_as_it_goes(open_store: OpenStore, small_disk: Path) -> None:
    store = open_store(small_disk / "kv", 32 * MIB)
    for number in range(40):
        keys = keys_of(20, f"chain {number}")
        assert write(store, keys, NUM_BYTES) == read(store, keys, NUM_BYTES) == 20, "the oldest made room"
    assert store.counts().blocks_evicted > 0


def test_a_disk_that_others_fill_pauses_writing(
    open_store: OpenStore, small_disk: Path, clock: VirtualClock
) -> None:
    store, keys = open_store(small_disk / "kv", 32 * MIB), keys_of(200)
    write(store, keys[:20], NUM_BYTES)
    filler = small_disk / "filler"
    with filler.open("wb") as file:
        while True:
            try:
                file.write(bytes(1 << 16))
                file.flush()
            except OSError:
                break
    kept = write(store, keys, NUM_BYTES)
    assert 20 <= kept < 200
    assert read(store, keys, NUM_BYTES) == kept
    assert store.counts().write_errors == 1
    assert write(store, keys, NUM_BYTES) == kept
    assert store.counts().write_errors == 1, "not tried again at once"
    filler.unlink(missing_ok=True)
    clock.advance(REFRESH_S)
    assert write(store, keys[:100], NUM_BYTES) == read(store, keys[:100], NUM_BYTES) == 100


def test_a_disk_that_may_only_be_read_is_read(open_store: OpenStore, small_disk: Path) -> None:
    store, keys = open_store(small_disk / "kv", 2 * MIB), keys_of(20)
    write(store, keys, NUM_BYTES)
    store.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    store = open_store(small_disk / "kv", 2 * MIB)
    assert read(store, keys, NUM_BYTES) == 20
    assert write(store, keys_of(3, "more"), NUM_BYTES) == 0
    assert store.counts().write_errors == 1


def test_a_removed_root_is_made_again(open_store: OpenStore, tmp_path: Path) -> None:
    store, keys = open_store(), keys_of(20)
    write(store, keys, NUM_BYTES)
    shutil.rmtree(next((tmp_path / "kv").iterdir()))
    assert read(store, keys, NUM_BYTES) == 20, "open files last"
    store.refresh()
    assert store.contains(keys) == read(store, keys, NUM_BYTES) == 0
    assert write(store, keys, NUM_BYTES) == read(store, keys, NUM_BYTES) == 20


def test_a_removed_folder_is_not_made_again(open_store: OpenStore, tmp_path: Path) -> None:
    """It may be the point of a file system that was unmounted: the disk beneath is not for this."""
    store, keys = open_store(), keys_of(20)
    write(store, keys[:10], NUM_BYTES)
    shutil.rmtree(tmp_path / "kv")
    store.refresh()
    assert store.contains(keys) == 0
    assert write(store, keys, NUM_BYTES) == 0
    assert not (tmp_path / "kv").exists()


def test_a_failing_disk_loses_blocks_and_raises_nothing(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, keys = open_store(), keys_of(20)
    write(store, keys, NUM_BYTES)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    assert read(store, keys, NUM_BYTES) == 0
    assert store.counts().read_errors == 1
    monkeypatch.setattr(os, "pwritev", fail)
    assert write(store, keys_of(2, "more"), NUM_BYTES) == 0
    assert store.counts().write_errors == 1


def test_a_read_that_gives_nothing_is_no_block(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, keys = open_store(), keys_of(4)
    write(store, keys, NUM_BYTES)
    monkeypatch.setattr(os, "preadv", lambda fd, parts, offset: 0)
    assert read(store, keys, NUM_BYTES) == 0


def test_a_short_write_is_no_block(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store, keys = open_store(), keys_of(4)
    write(store, keys[:2], NUM_BYTES)
    whole = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, offset: whole(fd, parts[:1], offset))
    assert write(store, keys, NUM_BYTES) == 2
    monkeypatch.undo()
    store.close()
    assert read(open_store(), keys, NUM_BYTES) == 2


LIMITED = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from tests.tiers.blocks import ROOT, keys_of, read, write
from quire.tiers.disk import DiskStore
store = DiskStore(Path(sys.argv[1]), 1 << 16, ROOT)
assert write(store, keys_of(2), 20_000) == 2
large = DiskStore(Path(sys.argv[1]), 1 << 26, ROOT)
assert write(large, keys_of(2, "more"), 20_000) == 0
assert read(store, keys_of(2), 20_000) == 2
store.close()
large.close()
"""


def test_a_limit_of_file_sizes_is_a_full_disk(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.rglob(f"*{SUFFIX}"))) == 2, "a segment that could not be begun leaves no file"
