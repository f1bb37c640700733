"""`MemoryStore`: bounded, leased, and exact about what has come and gone."""

from __future__ import annotations

import threading

from tests.tiers.blocks import BLOCK_BYTES, ROOT, content_of, keys_of, read, write

from quire.clock import VirtualClock
from quire.tiers.memory import MemoryStore
from quire.tiers.record import HEADER_BYTES

SIZE = 10 * (BLOCK_BYTES + HEADER_BYTES)


def store_of(clock: VirtualClock, size_bytes: int = SIZE, **more: int) -> MemoryStore:
    return MemoryStore(size_bytes, ROOT, clock=clock, **more)


def test_blocks_are_read_as_they_were_written(clock: VirtualClock) -> None:
    store, keys = store_of(clock), keys_of(8)
    assert (
        write(store, keys) == store.contains(keys_of(9)) == store.kept(keys) == read(store, keys_of(9)) == 8
    )
    assert store.read(keys[:1], [memoryview(bytearray(BLOCK_BYTES + 1))]) == 0
    assert store.contains(keys) == 0, "a block of another size is of no use"
    assert store.counts().blocks_damaged == 1


def test_leased_blocks_stay_and_others_make_room(clock: VirtualClock) -> None:
    store, keys, more = store_of(clock), keys_of(10), keys_of(10, "more")
    assert write(store, keys) == 10
    assert write(store, more) == 0
    clock.advance(11.0)
    assert read(store, keys[:4]) == 4
    assert write(store, more) == 6
    assert store.contains(keys) == 4
    assert store.contains(more) == 6
    counts = store.counts()
    assert (counts.num_blocks, counts.size_bytes) == (10, SIZE)
    assert (counts.blocks_evicted, counts.blocks_refused) == (6, 10 + 4)


def test_a_block_larger_than_the_store_is_refused(clock: VirtualClock) -> None:
    assert write(store_of(clock, 100), keys_of(1)) == 0


def test_changes_give_what_there_is(clock: VirtualClock) -> None:
    """Whoever follows knows the keys of the store, from any point in time, and however far behind."""
    store, known, since = store_of(clock, max_changes=16), set[bytes](), 0
    for number in range(40):
        clock.advance(11.0)
        write(store, keys_of(1 + number % 7, str(number)))
        if number % 3 == 0:
            now, is_all, added, removed = store.changes(since, 0.0)
            known = set(added) if is_all else (known | set(added)) - set(removed)
            since = now
            present = {
                key for each in range(number + 1) for key in keys_of(7, str(each)) if store.contains([key])
            }
            assert known == present
    assert store.changes(since, 0.0).now == since + 1 or store.changes(since, 0.0).added == []
    assert store.changes(10**9, 0.0).is_all


def test_a_reader_waits_for_a_block_until_it_is_there(clock: VirtualClock) -> None:
    store, (key,) = store_of(clock), keys_of(1)
    assert not store.wait_for(key, 0.01)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(store.wait_for(key, 30.0)))
    thread.start()
    write(store, [key])
    thread.join(10.0)
    assert found == [True]
    thread = threading.Thread(target=lambda: found.append(store.wait_for(keys_of(2)[1], 30.0)))
    thread.start()
    store.close()
    thread.join(10.0)
    assert found == [True, False]
    assert store.contains([key]) == write(store, [key]) == 0


def test_an_eviction_changes_nothing_that_was_read(clock: VirtualClock) -> None:
    store, keys = store_of(clock), keys_of(10)
    write(store, keys)
    buffer = memoryview(bytearray(BLOCK_BYTES))
    assert store.read(keys[:1], [buffer]) == 1
    clock.advance(11.0)
    write(store, keys_of(10, "more"))
    assert store.contains(keys) == 0
    assert bytes(buffer) == content_of(keys[0])
