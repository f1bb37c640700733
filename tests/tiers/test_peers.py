"""Peers: which block comes from where, who is told nothing, and what a peer that misbehaves costs."""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import pytest
from tests.gateway.services import wait_until
from tests.tiers.blocks import BLOCK_BYTES, MIB, OTHER_ROOT, ROOT, content_of, keys_of, read, write

from quire.clock import WallClock
from quire.errors import ConfigError
from quire.tiers import peer_wire
from quire.tiers.memory import MemoryStore
from quire.tiers.peer import Peer
from quire.tiers.peer_server import PeerServer
from quire.tiers.peers import PeerStore, address_of, open_peers, shared_secret
from quire.tiers.record import HEADER_BYTES, header_of, short_root

SECRET = b"a secret of peers"
HOST = "127.0.0.1"


class Giver:
    """An engine that gives blocks."""

    def __init__(self, root: str = ROOT, secret: bytes = SECRET, size_bytes: int = 64 * MIB) -> None:
        self.store = MemoryStore(size_bytes, root)
        self.engine_id = secrets.token_bytes(16)
        self.server = PeerServer(self.store, (HOST, 0), root, secret, self.engine_id, meeting_s=0.5)
        self.address = HOST, self.server.port

    def close(self) -> None:
        self.server.close()
        self.store.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def giver(stack: ExitStack) -> Giver:
    return stack.enter_context(closing(Giver()))


def peer_of(address: tuple[str, int], secret: bytes = SECRET, root: str = ROOT, **more: Any) -> Peer:
    return Peer(address, root, secret, **{"follows": False, "timeout_s": 0.5, **more})


def taker_of(*givers: Giver, **more: Any) -> PeerStore:
    peers = [peer_of(giver.address, **more) for giver in givers]
    for peer in peers:
        peer.follow(once=True)
    return PeerStore(MemoryStore(64 * MIB, ROOT), None, peers)


def test_blocks_come_from_whoever_has_them(stack: ExitStack, giver: Giver) -> None:
    other = stack.enter_context(closing(Giver()))
    keys = keys_of(2000)
    write(giver.store, keys[10:1800])  # more than a span
    write(other.store, keys[1700:1900])
    taker = stack.enter_context(closing(taker_of(giver, other)))
    write(taker, keys[:20])
    assert taker.contains(keys) == read(taker, keys) == 1900
    assert taker.kept(keys) == 20
    counts = taker.counts()
    assert counts.blocks_read == 1900
    assert counts.num_blocks == 20


def test_a_peer_is_told_of_blocks_as_they_come_and_go(giver: Giver) -> None:
    with closing(peer_of(giver.address, follows=True, timeout_s=5.0)) as peer:
        keys = keys_of(3)
        write(giver.store, keys[:1])
        wait_until(lambda: peer.has(keys[0]), "the first block")
        write(giver.store, keys[1:])
        wait_until(lambda: peer.has(keys[2]), "the third block", limit_s=5.0)
        assert giver.store.read(keys[1:2], [memoryview(bytearray(1))]) == 0  # it is dropped there
        wait_until(lambda: not peer.has(keys[1]), "the second block's end")
        assert peer.engine_id == giver.engine_id.hex()


def test_a_block_that_is_to_come_is_waited_for(giver: Giver) -> None:
    peer, keys = peer_of(giver.address), keys_of(6)
    write(giver.store, keys[:2])

    def write_late() -> None:
        for key in keys[2:5]:
            time.sleep(0.05)
            write(giver.store, [key])

    thread = threading.Thread(target=write_late)
    thread.start()
    buffers = [memoryview(bytearray(BLOCK_BYTES)) for _ in keys]
    assert peer.read(keys[:5], buffers[:5], wait_s=60.0) == 5
    thread.join()
    assert peer.read(keys[5:], buffers[5:], wait_s=0.1) == 0
    assert [bytes(buffer) for buffer in buffers[:5]] == [content_of(key) for key in keys[:5]]
    assert peer.counts.read_errors == 0


def test_only_the_peer_that_is_named_is_waited_for(stack: ExitStack, giver: Giver) -> None:
    other = stack.enter_context(closing(Giver()))
    taker, keys = stack.enter_context(closing(taker_of(giver, other))), keys_of(4)
    buffers = [memoryview(bytearray(BLOCK_BYTES)) for _ in keys]
    write(giver.store, keys)  # since the takers' last look
    assert taker.contains(keys) == 0
    for stranger in ("", "00" * 16, f"{HOST}:{giver.server.port}"):
        assert taker.read(keys, buffers, stranger) == 0
    assert taker.read(keys, buffers, other.engine_id.hex()) == 0
    assert taker.read(keys, buffers, giver.engine_id.hex()) == 4
    assert [bytes(buffer) for buffer in buffers] == [content_of(key) for key in keys]


@pytest.mark.parametrize("wrong", ["secret", "root"])
def test_a_stranger_is_told_nothing(stack: ExitStack, wrong: str) -> None:
    root, secret = (OTHER_ROOT, SECRET) if wrong == "root" else (ROOT, SECRET[::-1])
    giver = stack.enter_context(closing(Giver(root, secret)))
    write(giver.store, keys_of(3))
    taker = taker_of(giver)
    assert taker.contains(keys_of(3)) == read(taker, keys_of(3)) == 0


def test_a_taker_without_the_secret_gets_no_answer(giver: Giver) -> None:
    """Also one that sends back what the giver has proved."""
    with socket.create_connection(giver.address, 5.0) as sock:
        channel = peer_wire.Channel(sock, WallClock())
        channel.limit(5.0)
        channel.send([peer_wire.MAGIC + bytes(32)])
        answer = channel.receive(4 + 32 + 16 + 32)
        channel.send([short_root(ROOT), answer[-32:]])
        with pytest.raises(ConnectionError):
            channel.receive(1)


def test_a_giver_without_the_secret_is_not_believed() -> None:
    """Also one that lets the taker prove the secret to itself, and says yes."""
    listener = socket.create_server((HOST, 0))

    def serve() -> None:
        sock, _ = listener.accept()
        with sock:
            channel = peer_wire.Channel(sock, WallClock())
            channel.limit(5.0)
            channel.receive(36)
            channel.send([peer_wire.MAGIC + bytes(32 + 16 + 32), b"\1", *block_of(keys_of(1)[0])])
            with suppress(OSError):
                channel.receive(1 << 16)

    with listener:
        thread = threading.Thread(target=serve)
        thread.start()
        peer = peer_of(listener.getsockname())
        assert peer.read(keys_of(1), [memoryview(bytearray(BLOCK_BYTES))]) == 0
        thread.join(10.0)


def test_one_that_says_nothing_is_left(giver: Giver) -> None:
    with socket.create_connection(giver.address, 5.0) as sock:
        assert sock.recv(1) == b"", "after half a second"


@contextmanager
def liar(answer: Callable[[peer_wire.Channel, list[bytes]], None]) -> Iterator[tuple[str, int]]:
    """A peer that has the secret, and answers a question for blocks in its own way."""
    listener = socket.create_server((HOST, 0))

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                channel = peer_wire.Channel(sock, WallClock())
                channel.limit(10.0)
                try:
                    peer_wire.meet_taker(channel, SECRET, short_root(ROOT), bytes(16))
                    if channel.receive(1) == peer_wire.READ:
                        answer(channel, peer_wire.take_blocks_question(channel)[1])
                except OSError:
                    pass

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(15.0)


def block_of(key: bytes, root: str = ROOT, num_bytes: int = BLOCK_BYTES) -> list[bytes | memoryview]:
    content = memoryview(content_of(key, num_bytes))
    return [b"\1", header_of(short_root(root), key, [content]), content]


def flipped(parts: list[bytes | memoryview], at: int) -> list[bytes | memoryview]:
    data = bytearray(b"".join(parts))
    data[at] ^= 4
    return [memoryview(data)]


LIES: dict[str, Callable[[bytes], list[bytes | memoryview]]] = {
    "payload": lambda key: flipped(block_of(key), 2000),
    "header": lambda key: flipped(block_of(key), 60),
    "size": lambda key: block_of(key, num_bytes=BLOCK_BYTES + 1),
    "root": lambda key: block_of(key, OTHER_ROOT),
    "key": lambda key: block_of(keys_of(9)[8]),
    "cut": lambda key: [memoryview(b"".join(block_of(key)))[:-1]],
    "status": lambda key: [b"\7"],
    "nothing": lambda key: [],
}


@pytest.mark.parametrize("lie", sorted(LIES))
def test_what_a_peer_gets_wrong_is_no_block(lie: str) -> None:
    keys = keys_of(5)

    def answer(channel: peer_wire.Channel, wanted: list[bytes]) -> None:
        channel.send([part for key in wanted[:3] for part in block_of(key)])
        channel.send(LIES[lie](wanted[3]))

    with liar(answer) as address:
        peer = peer_of(address)
        buffers = [memoryview(bytearray(BLOCK_BYTES)) for _ in keys]
        assert peer.read(keys, buffers) == 3
        counts = peer.counts
        assert counts.blocks_damaged + counts.blocks_lost + counts.read_errors == 1
        assert counts.blocks_read == 3


def test_a_peer_that_trickles_holds_a_read_for_a_second() -> None:
    def answer(channel: peer_wire.Channel, wanted: list[bytes]) -> None:
        for byte in b"".join(block_of(wanted[0])):
            channel.send([bytes([byte])])
            time.sleep(0.02)

    with liar(answer) as address:
        peer = peer_of(address)
        assert peer.read(keys_of(1), [memoryview(bytearray(BLOCK_BYTES))]) == 0, (
            "a whole block would take a minute"
        )
        assert peer.read(keys_of(1), [memoryview(bytearray(BLOCK_BYTES))]) == 0, (
            "nothing is asked for a while"
        )
        assert peer.counts.read_errors == 1


def test_a_peer_that_dies_leaves_the_rest_to_another(stack: ExitStack, giver: Giver) -> None:
    other = stack.enter_context(closing(Giver()))
    keys = keys_of(40)
    for each in (giver, other):
        write(each.store, keys)
    taker = taker_of(giver, other)
    giver.close()
    assert read(taker, keys) == 40
    other.close()
    assert read(taker, keys) == taker.contains(keys) == 0
    assert taker.counts().read_errors == 2


def test_a_peer_is_found_again_after_its_restart(giver: Giver) -> None:
    keys = keys_of(4)
    write(giver.store, keys)
    with closing(peer_of(giver.address, follows=True, pause_s=0.05)) as peer:
        wait_until(lambda: peer.has(keys[3]), "the first life's blocks")
        giver.close()
        wait_until(lambda: not peer.has(keys[3]), "the end of the first life")
        store = MemoryStore(MIB, ROOT)
        write(store, keys[:2])
        with closing(PeerServer(store, giver.address, ROOT, SECRET, bytes(16))):
            wait_until(lambda: peer.has(keys[1]), "the second life's blocks")
            assert not peer.has(keys[3])
            assert peer.engine_id == bytes(16).hex()


def test_a_failed_read_does_not_end_what_is_known_for_good(giver: Giver) -> None:
    """While the connection that tells of blocks lives on."""
    keys = keys_of(2)
    write(giver.store, keys)
    with closing(peer_of(giver.address, follows=True, pause_s=0.2)) as peer:
        wait_until(lambda: peer.has(keys[1]), "the blocks")
        peer.read(keys, [memoryview(bytearray(BLOCK_BYTES + 1))] * 2)
        assert peer.counts.blocks_damaged == 1
        wait_until(lambda: peer.has(keys[1]), "the block that was not asked for")


def test_keys_that_do_not_add_up_are_refused() -> None:
    one, other = socket.socketpair()
    with one, other:
        sender, receiver = (peer_wire.Channel(sock, WallClock()) for sock in (one, other))
        for channel in (sender, receiver):
            channel.limit(5.0)
        for count, data in [(2, b"\1a"), (1, b"\0"), (1, b"\5abc"), (1, b"\xff" + bytes(255))]:
            sender.send([struct.pack("<III", 0, count, len(data)), data])
            with pytest.raises(peer_wire.PeerError):
                peer_wire.take_blocks_question(receiver)
            while True:
                receiver.limit(0.02)
                try:
                    receiver.receive(1)
                except TimeoutError:
                    receiver.limit(5.0)
                    break


def test_settings_that_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, giver: Giver) -> None:
    monkeypatch.delenv("QUIRE_KV_SECRET", raising=False)
    monkeypatch.setenv("QUIRE_KV_SECRET_FILE", str(tmp_path / "secret"))
    with pytest.raises(ConfigError, match="QUIRE_KV_SECRET"):
        shared_secret()
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    assert shared_secret() == SECRET
    for setting in ("host", "host:", ":1", "host:70000", "host:-1"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            address_of(setting, "kv_peers")
    assert address_of("[::1]:9500", "kv_peers") == ("::1", 9500)
    with pytest.raises(ConfigError, match="cannot be listened at"):
        open_peers(f"{HOST}:{giver.server.port}", MIB, (), ROOT, "00" * 16)
    assert HEADER_BYTES < BLOCK_BYTES
