"""`DiskStore`: what is written is read, over restarts, within its bound, by this user alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.tiers.blocks import BLOCK_BYTES, MIB, OTHER_ROOT, ROOT, keys_of, parts_of, read, write

from quire.clock import VirtualClock
from quire.errors import ConfigError
from quire.tiers import folder as tier_folder
from quire.tiers.contents import clear
from quire.tiers.disk import DiskStore
from quire.tiers.record import HEADER_BYTES, header_of, short_root
from quire.tiers.segment import HEAD_BYTES, SUFFIX
from quire.tiers.spans import SPAN_BYTES

OpenStore = Callable[..., DiskStore]


def segments(folder: Path) -> list[Path]:
    return sorted(folder.rglob(f"*{SUFFIX}"))


def test_written_blocks_are_read(open_store: OpenStore) -> None:
    store, keys = open_store(), keys_of(40)
    assert store.contains(keys) == read(store, keys) == 0
    assert write(store, keys[:30]) == 30
    assert store.contains(keys) == read(store, keys) == 30
    assert store.contains(keys[29:]) == 1
    assert store.contains(keys[30:]) == 0


def test_a_block_is_written_once(open_store: OpenStore) -> None:
    store, keys = open_store(), keys_of(5)
    write(store, keys[:3])
    assert write(store, keys) == 5
    assert store.counts().blocks_written == 5


def test_a_block_may_take_more_buffers_than_one_system_call(open_store: OpenStore) -> None:
    store, (key,) = open_store(), keys_of(1)
    whole = memoryview(os.urandom(5000))
    assert store.write([key], [[whole[i : i + 1] for i in range(5000)]]) == 1
    buffer = bytearray(5000)
    assert store.read([key], [memoryview(buffer)]) == 1
    assert buffer == whole


def test_a_read_of_many_spans_is_whole(open_store: OpenStore) -> None:
    num_bytes = SPAN_BYTES // 3
    store, keys = open_store(), keys_of(20)
    write(store, keys, num_bytes)
    assert read(store, keys, num_bytes) == 20
    shuffled = [*keys[10:], *keys[:10:2], *keys[1:10:2]]
    assert read(store, shuffled, num_bytes) == 20


@pytest.mark.parametrize("seals", [True, False])
def test_blocks_survive_a_restart(open_store: OpenStore, seals: bool) -> None:
    first, keys = open_store(), keys_of(40)
    write(first, keys)
    if seals:
        first.close()
    second = open_store()
    assert second.contains(keys) == read(second, keys) == 40
    assert second.counts().num_blocks == 40


def test_roots_are_apart(open_store: OpenStore, tmp_path: Path) -> None:
    one, other, keys = open_store(), open_store(root=OTHER_ROOT), keys_of(4)
    write(one, keys)
    one.close()
    other.refresh()
    assert other.contains(keys) == 0
    path = segments(tmp_path)[0]
    moved = tmp_path / "kv" / OTHER_ROOT / path.name
    moved.parent.mkdir(exist_ok=True)
    path.rename(moved)
    assert open_store(root=OTHER_ROOT).contains(keys) == 0, "a segment says which root it belongs to"


def test_another_size_is_a_miss(open_store: OpenStore) -> None:
    store, keys = open_store(), keys_of(4)
    write(store, keys)
    assert read(store, keys, BLOCK_BYTES + 1) == 0
    assert store.counts().blocks_damaged == 1
    assert store.contains(keys) == 0, "the block is not offered again"


def test_bound_holds_and_oldest_segments_go(open_store: OpenStore, tmp_path: Path) -> None:
    size = 4 * MIB
    store = open_store(size=size)
    chains = [keys_of(50, f"chain {number}") for number in range(40)]
    for keys in chains:
        assert write(store, keys) == 50
        assert sum(path.stat().st_size for path in segments(tmp_path)) <= size
    assert store.contains(chains[-1]) == 50
    assert store.contains(chains[0]) == 0
    assert store.counts().blocks_evicted > 0


def test_a_hit_keeps_a_segment(open_store: OpenStore, tmp_path: Path, clock: VirtualClock) -> None:
    store = open_store(size=8 * MIB)
    hot, cold = keys_of(20, "hot"), keys_of(20, "cold")
    for keys in (hot, cold):
        write(store, keys, 40_000)
        store.close()
        store = open_store(size=8 * MIB)
    for path in segments(tmp_path):
        os.utime(path, ns=(10**9, 10**9))
    assert read(store, hot, 40_000) == 20
    number = 0
    while store.contains(cold) == 20:
        write(store, keys_of(20, f"more {number}"), 40_000)
        number += 1
    assert store.contains(hot) == 20


def test_a_block_larger_than_the_bound_evicts_nothing(open_store: OpenStore) -> None:
    store, keys = open_store(size=MIB), keys_of(5)
    write(store, keys)
    assert write(store, keys_of(1, "large"), 2 * MIB) == 0
    assert store.contains(keys) == 5
    assert store.counts().blocks_refused == 1


def test_a_block_that_is_being_written_is_not_seen(open_store: OpenStore, tmp_path: Path) -> None:
    """The header of a block and half of its bytes lie behind what the segment's head says is whole."""
    writer, keys = open_store(), keys_of(3)
    write(writer, keys[:2])
    (path,) = segments(tmp_path)
    parts = parts_of(keys[2])
    with path.open("r+b") as file:
        file.seek(HEAD_BYTES + 2 * (HEADER_BYTES + BLOCK_BYTES))
        file.write(header_of(short_root(ROOT), keys[2], parts) + bytes(parts[0]))
    reader = open_store()
    assert reader.contains(keys) == 2
    assert read(reader, keys) == 2
    assert write(writer, keys) == 3
    reader.refresh()
    assert read(reader, keys) == 3
    assert reader.counts().blocks_damaged == 0


def test_only_this_user_may_read(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    write(store, keys_of(2))
    store.close()
    folders = [path for path in (tmp_path / "kv", *(tmp_path / "kv").rglob("*")) if path.is_dir()]
    files = [path for path in (tmp_path / "kv").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert len(folders) == 2
    assert len(files) == 2


def test_wear_is_counted_over_restarts(open_store: OpenStore, tmp_path: Path) -> None:
    for number in range(3):
        store = open_store()
        write(store, keys_of(10, str(number)))
        store.close()
        assert store.counts().wear_bytes > 10 * BLOCK_BYTES
    wear = tier_folder.TierFolder(tmp_path / "kv", 0).wear_bytes()
    assert 30 * BLOCK_BYTES < wear < 33 * BLOCK_BYTES + 10_000


def test_a_closed_store_finds_and_keeps_nothing(open_store: OpenStore) -> None:
    store, keys = open_store(), keys_of(4)
    write(store, keys)
    store.close()
    store.close()
    assert store.contains(keys) == read(store, keys) == 0
    assert write(store, keys_of(2, "late")) == 0


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        DiskStore(tmp_path / "file", MIB, ROOT)
    with pytest.raises(ConfigError, match="cannot be made"):
        DiskStore(tmp_path / "file" / "below", MIB, ROOT)
    with pytest.raises(ConfigError, match="hexadecimal"):
        DiskStore(tmp_path / "kv", MIB, "../elsewhere")
    monkeypatch.setattr(tier_folder, "file_system_of", lambda path: "nfs4")
    with pytest.raises(ConfigError, match=r"network file system \(nfs4\)"):
        DiskStore(tmp_path / "kv", MIB, ROOT)
    DiskStore(tmp_path / "kv", MIB, ROOT, allows_network=True).close()


def test_the_file_system_of_a_folder_is_known() -> None:
    assert tier_folder.file_system_of(Path("/proc/self")) == "proc"
    assert tier_folder.file_system_of(Path("/no/such/folder")) == tier_folder.file_system_of(Path("/"))


def test_clear_removes_segments_and_leaves_other_files(open_store: OpenStore, tmp_path: Path) -> None:
    for root in (ROOT, OTHER_ROOT):
        store = open_store(root=root)
        write(store, keys_of(3))
        store.close()
    note = tmp_path / "kv" / "note.txt"
    note.write_text("not of the tier")
    assert clear(tmp_path / "kv", ROOT)[0] == 1
    assert [path.parent.name for path in segments(tmp_path)] == [OTHER_ROOT]
    assert clear(tmp_path / "kv")[0] == 1
    assert not segments(tmp_path)
    assert note.exists()


def test_a_store_goes_on_after_clear(open_store: OpenStore, tmp_path: Path) -> None:
    store, keys = open_store(), keys_of(3)
    write(store, keys)
    clear(tmp_path / "kv")
    store.refresh()
    assert store.contains(keys) == 0
    assert write(store, keys) == read(store, keys) == 3
    assert len(segments(tmp_path)) == 1
