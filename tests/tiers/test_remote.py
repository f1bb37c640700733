"""`RedisStore` on a real server: shared by engines, never a wrong block, and no long wait, whatever the server does."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from tests.gateway.services import Redis, redis_server
from tests.tiers.blocks import OTHER_ROOT, ROOT, keys_of, read, write

from quire.clock import VirtualClock
from quire.tiers.remote import RedisStore

redis = pytest.importorskip("redis")
NUM_BYTES = 20_000
PREFIX = f"quire:kv:{ROOT}:".encode()


@pytest.fixture(scope="module")
def server() -> Iterator[Redis]:
    with redis_server() as started:
        yield started


@pytest.fixture
def stores(server: Redis) -> Iterator[tuple[RedisStore, RedisStore]]:
    """Two engines' stores of an empty server."""
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        client.config_set("maxmemory", 0)
    with ExitStack() as stack:
        yield tuple(
            stack.enter_context(closing(RedisStore(server.url, ROOT, refresh_s=None))) for _ in range(2)
        )


def test_what_one_engine_writes_another_reads(stores: tuple[RedisStore, RedisStore], server: Redis) -> None:
    one, other = stores
    keys = keys_of(30)
    assert write(one, keys[:20], NUM_BYTES) == read(one, keys, NUM_BYTES) == 20
    assert other.contains(keys) == 0
    other.refresh()
    assert other.contains(keys) == read(other, keys, NUM_BYTES) == 20
    assert write(other, keys, NUM_BYTES) == 30
    assert other.counts().blocks_written == 10
    with closing(RedisStore(server.url, OTHER_ROOT, refresh_s=None)) as apart:
        assert apart.contains(keys) == read(apart, keys, NUM_BYTES) == 0


def test_blocks_end_after_their_time(server: Redis) -> None:
    with closing(RedisStore(server.url, "a" * 16, ttl_s=2, refresh_s=None)) as store:
        keys = keys_of(3)
        write(store, keys, NUM_BYTES)
        assert read(store, keys, NUM_BYTES) == 3
        time.sleep(2.1)
        assert read(store, keys, NUM_BYTES) == 0
        assert store.counts().blocks_lost == 1
        store.refresh()
        assert store.contains(keys[1:]) == 0


@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "swapped", "type", "gone"])
def test_a_value_that_was_changed_is_no_block(
    stores: tuple[RedisStore, RedisStore], server: Redis, damage: str
) -> None:
    store, _ = stores
    keys = keys_of(6)
    write(store, keys, NUM_BYTES)
    with redis.Redis.from_url(server.url) as client:
        name = PREFIX + keys[3]
        value = client.get(name)
        if damage == "type":
            client.delete(name)
            client.hset(name, "a", "b")
        elif damage == "gone":
            client.delete(name)
        elif damage == "swapped":
            client.set(name, client.get(PREFIX + keys[0]))
        elif damage == "flip":
            client.set(name, value[:9_000] + bytes([value[9_000] ^ 4]) + value[9_001:])
        else:
            client.set(name, value[:-1] if damage == "cut" else value + b"!")
    assert read(store, keys, NUM_BYTES) == 3
    assert store.contains(keys) == 3


def test_a_full_server_keeps_fewer_blocks(stores: tuple[RedisStore, RedisStore], server: Redis) -> None:
    store, _ = stores
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 300_000)
        keys = keys_of(100)
        kept = write(store, keys, NUM_BYTES)
        client.config_set("maxmemory", 0)
    assert 0 <= kept < 100
    assert store.counts().write_errors == 1


def test_a_server_that_stops_holds_no_call_for_long(
    stores: tuple[RedisStore, RedisStore], server: Redis
) -> None:
    clock, keys = VirtualClock(10.0), keys_of(40)
    assert stores[0].contains(keys) == 0
    with closing(RedisStore(server.url, ROOT, timeout_s=0.5, refresh_s=None, clock=clock)) as store:
        write(store, keys, NUM_BYTES)
        with redis.Redis.from_url(server.url) as client:
            process_id = client.info("server")["process_id"]
        os.kill(process_id, signal.SIGSTOP)
        try:
            start_s = time.monotonic()
            assert read(store, keys, NUM_BYTES) == 0
            assert store.contains(keys) == 0
            assert write(store, keys_of(5, "more"), NUM_BYTES) == 0
            store.refresh()
            assert time.monotonic() - start_s < 15.0, "not one limit per key"
        finally:
            os.kill(process_id, signal.SIGCONT)
        clock.advance(5.0)
        assert store.contains(keys) == read(store, keys, NUM_BYTES) == 40


def test_a_state_may_take_longer_than_an_answer(stores: tuple[RedisStore, RedisStore], server: Redis) -> None:
    """It has more bytes than a network carries within the timeout."""
    keys, num_bytes, piece_s = keys_of(1, "state"), 24 << 20, 0.004
    with socket.create_server(("127.0.0.1", 0)) as slow:

        def carry(source: socket.socket, target: socket.socket, pause_s: float) -> None:
            while data := source.recv(1 << 18):
                time.sleep(pause_s)
                target.sendall(data)

        def serve() -> None:
            with slow.accept()[0] as near, socket.create_connection(("127.0.0.1", server.port)) as far:
                threading.Thread(target=carry, args=(far, near, 0.0), daemon=True).start()
                carry(near, far, piece_s)

        slow.settimeout(5.0)
        threading.Thread(target=serve, daemon=True).start()
        url = f"redis://127.0.0.1:{slow.getsockname()[1]}/0"
        with closing(RedisStore(url, ROOT, timeout_s=0.25, refresh_s=None)) as store:
            assert write(store, keys, num_bytes) == 1
    stores[0].refresh()
    assert read(stores[0], keys, num_bytes) == 1


def test_a_server_that_is_gone_costs_nothing() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{probe.getsockname()[1]}/0"
    with closing(RedisStore(url, ROOT, timeout_s=0.2, refresh_s=None)) as store:
        assert store.contains(keys_of(3)) == read(store, keys_of(3)) == write(store, keys_of(3)) == 0
        assert store.counts().read_errors == 1


@pytest.mark.parametrize(
    "answer", [b"+OK\r\n", b"*0\r\n", b"$-1\r\n", b"*2\r\n$1\r\nx\r\n:5\r\n", b"nonsense\r\n", b""]
)
def test_a_server_that_lies_gives_no_block(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as liar:

        def serve() -> None:
            while True:
                try:
                    connection, _ = liar.accept()
                except OSError:
                    return
                with connection:
                    while connection.recv(1 << 16):
                        connection.sendall(answer * 4)
                        if not answer:
                            break

        threading.Thread(target=serve, daemon=True).start()
        clock = VirtualClock(10.0)
        url = f"redis://127.0.0.1:{liar.getsockname()[1]}/0"
        with closing(RedisStore(url, ROOT, timeout_s=0.2, refresh_s=None, clock=clock)) as store:
            for _ in range(3):
                clock.advance(60.0)
                assert read(store, keys_of(4), NUM_BYTES) == 0
                clock.advance(60.0)
                store.refresh()
                write(store, keys_of(4), NUM_BYTES)
        liar.shutdown(socket.SHUT_RDWR)
