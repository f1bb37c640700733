"""`FaultyPeers`: an engine's store whose blocks are with two peers that die, hang, lie and change, on a seed.

Stores, servers and connections are the real ones, over TCP in this process; what spoils a connection stands between.
Peers see a virtual clock, so what is slow takes no time here:

    dead           the peer takes no connection for the next operations
    restarted      it has a new life, with no blocks
    cut            the connection ends after some bytes: it dies within a proof, between blocks, or within one
    slow           it sends so slowly that the taker gives it up
    hang           it sends nothing more, and keeps the connection
    flip           a byte of what it sends changes: of a proof, of the list of blocks, of a header, or of a block
    wrong-size     it has blocks of another size under the keys, with the right checksums
    lies-more      it says that it has blocks which it has not
    lies-less      it says that it has none
    other-secret   it has another secret
    other-version  it speaks another version of the protocol
    other-root     it has another model
    leases-end     the leases of all blocks end at once, and others take their room
    broken-promise a request says that it computes blocks, and it dies before they are there
    vanishes       another taker asks for the blocks, and goes without reading them
    junk           something that is no peer connects to it

What the buffers hold after the blocks that were read is always spoiled.
"""

from __future__ import annotations

import random
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Literal, get_args

from quire.clock import VirtualClock
from quire.tiers.memory import Changes, MemoryStore
from quire.tiers.peer import Peer
from quire.tiers.peer_server import PeerServer
from quire.tiers.peer_wire import Channel, ask_blocks, meet_giver
from quire.tiers.peers import PeerStore
from quire.tiers.record import short_root
from quire.tiers.store import StoreCounts

PeerFault = Literal[
    "dead", "restarted", "cut", "slow", "hang", "flip", "wrong-size", "lies-more", "lies-less", "other-secret",
    "other-version", "other-root", "leases-end", "broken-promise", "vanishes", "junk",
]  # fmt: skip
PEER_FAULTS: tuple[PeerFault, ...] = get_args(PeerFault)
_OF_NEWS: tuple[PeerFault, ...] = (
    "dead", "cut", "slow", "hang", "flip", "lies-more", "lies-less", "other-secret", "other-version", "other-root",
)  # fmt: skip
_OF_READ: tuple[PeerFault, ...] = (
    "dead", "restarted", "cut", "slow", "hang", "flip", "wrong-size", "other-secret", "other-version", "other-root",
    "leases-end", "broken-promise", "vanishes", "junk",
)  # fmt: skip
HOST = "127.0.0.1"
SECRET = b"a secret of two engines"


class _Liar(MemoryStore):
    """What a server gives away that lies: about the blocks of another store, or with junk of another size."""

    def __init__(self, store: MemoryStore, lie: PeerFault, lost: Sequence[bytes], root: str) -> None:
        super().__init__(1 << 20, root)
        self._store, self._lie, self._lost = store, lie, list(lost)

    def changes(self, since: int, timeout_s: float) -> Changes:
        now, _, added, _ = self._store.changes(0, 0.0)
        return Changes(max(1, now), True, [] if self._lie == "lies-less" else [*added, *self._lost], [])

    def wait_for(self, key: bytes, timeout_s: float) -> bool:
        return True

    def num_bytes_of(self, key: bytes) -> int | None:
        return 1 + len(key)

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview], giver: str = "") -> int:
        return len(keys)


class Giver:
    """A peer with its blocks, and a port in front of it at which one connection after another may be spoiled."""

    def __init__(self, size_bytes: int, root: str, seed: int) -> None:
        self.clock, self.seen = VirtualClock(), Counter[PeerFault]()
        self.engine_id = secrets.token_bytes(16)
        self.store = MemoryStore(size_bytes, root, clock=self.clock)
        self.server = PeerServer(self.store, (HOST, 0), root, SECRET, self.engine_id)
        # Of the next connection. ``slow`` calls ``pass_time``.
        self.fault: PeerFault | None = None
        self.lost: Sequence[bytes] = ()
        self.pass_time: Callable[[], object] = lambda: None
        self._size_bytes, self._root, self._random = size_bytes, root, random.Random(seed)
        self._listener = socket.create_server((HOST, 0))
        self.address = HOST, int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def restart(self) -> None:
        """Begin a new life without blocks."""
        self.server.close()
        self.store.close()
        self.engine_id = secrets.token_bytes(16)
        self.store = MemoryStore(self._size_bytes, self._root, clock=self.clock)
        self.server = PeerServer(self.store, (HOST, 0), self._root, SECRET, self.engine_id)

    def end_leases(self) -> None:
        """Let all leases end, and other blocks take all the room; these are not leased any more, either."""
        for _ in range(2):
            self.clock.advance(60.0)
            self.store.write([secrets.token_bytes(32)], [[memoryview(bytes(self._size_bytes * 9 // 10))]])
        self.clock.advance(60.0)

    def vanish(self, keys: Sequence[bytes], clock: VirtualClock) -> None:
        """Ask for blocks, and go."""
        with suppress(OSError), socket.create_connection((HOST, self.server.port), 10.0) as sock:
            channel = Channel(sock, clock)
            channel.limit(10.0)
            meet_giver(channel, SECRET, short_root(self._root))
            ask_blocks(channel, keys, 0.0)

    def junk(self) -> None:
        """Connect, and send something else."""
        with suppress(OSError), socket.create_connection((HOST, self.server.port), 10.0) as sock:
            sock.sendall(self._random.randbytes(self._random.randrange(100)))

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.server.close()
        self.store.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            fault, self.fault = self.fault, None
            threading.Thread(target=self._serve, args=(sock, fault), daemon=True).start()

    def _serve(self, sock: socket.socket, fault: PeerFault | None) -> None:
        with sock, suppress(OSError):
            if fault == "dead":
                self.seen[fault] += 1
                return
            with (
                self._server_with(fault) as server,
                socket.create_connection((HOST, server.port), 10.0) as out,
            ):
                up = threading.Thread(target=_pump, args=(sock, out), daemon=True)
                up.start()
                self._pump_down(out, sock, fault)
                for end in (out, sock):
                    with suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
                up.join(10.0)

    @contextmanager
    def _server_with(self, fault: PeerFault | None) -> Iterator[PeerServer]:
        store, root, secret = self.store, self._root, SECRET
        match fault:
            case "wrong-size" | "lies-more" | "lies-less":
                store = _Liar(self.store, fault, self.lost, self._root)
            case "other-secret":
                secret = SECRET[::-1]
            case "other-root":
                root = "f" * 32
            case _:
                yield self.server
                return
        self.seen[fault] += 1
        with closing(PeerServer(store, (HOST, 0), root, secret, self.engine_id)) as server:
            yield server

    def _pump_down(self, source: socket.socket, target: socket.socket, fault: PeerFault | None) -> None:
        """Pass on what the server says, up to where the fault is.

        After a change both sides may wait for each other: the connection ends soon then.
        """
        at = -1
        if fault == "other-version":
            at = 3
        elif fault in ("cut", "slow", "hang", "flip"):
            at = self._random.randrange(self._random.choice((100, 300, 20_000)))
        num_passed = 0
        while data := bytearray(source.recv(1 << 16)):
            place = at - num_passed
            num_passed += len(data)
            if 0 <= place < len(data) and fault is not None:
                self.seen[fault] += 1
                if fault in ("flip", "other-version"):
                    source.settimeout(0.2)
                    data[place] ^= 1 << self._random.randrange(8)
                else:
                    target.sendall(data[:place])
                    if fault == "cut":
                        return
                    if fault == "hang":
                        _pump(target, None)
                        return
                    self.pass_time()
                    data = data[place:]
            target.sendall(data)


def _pump(source: socket.socket, target: socket.socket | None) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            if target is not None:
                target.sendall(data)
        if target is not None:
            target.shutdown(socket.SHUT_WR)


class FaultyPeers:
    """The `PeerStore` of one engine, of two givers with faults. Each operation has at most one.

    ``rates``: probability of a fault per operation in which it may happen; 0 for those that are not named. ``wait`` is
    called with the seconds that an operation takes. What the engine writes is with its peers, too: they had the same
    prompts.
    """

    name = "peers"

    def __init__(
        self, givers: Sequence[Giver], size_bytes: int, root: str, *, rates: Mapping[PeerFault, float], seed: int,
        wait: Callable[[float], object], timeout_s: float = 0.3,
    ) -> None:  # fmt: skip
        self._givers, self._rates, self._random, self._wait = givers, rates, random.Random(seed), wait
        self._clock, self._timeout_s = VirtualClock(), timeout_s
        peers = [
            Peer(address, root, SECRET, follows=False, timeout_s=timeout_s, pause_s=2.0, clock=self._clock)
            for address in (giver.address for giver in givers)
        ]
        self._peers = peers
        self._store = PeerStore(MemoryStore(size_bytes, root, lease_s=0.0), None, peers, patience_s=0.01)
        self._has_news = False
        self._dead_for = [0 for _ in givers]
        self._promised = False
        for giver in givers:
            giver.pass_time = self._pass_time
        self._before = sum((giver.seen for giver in givers), Counter[PeerFault]())

    @property
    def seen(self) -> Counter[PeerFault]:
        """The faults that took place in the time of this engine."""
        return sum((giver.seen for giver in self._givers), Counter[PeerFault]()) - self._before

    def contains(self, keys: Sequence[bytes]) -> int:
        if not self._has_news or self._random.random() < 0.4:
            self._hear_news(keys)
        count = self._store.contains(keys)
        self._promised = count < len(keys) and self._random.random() < self._rates.get("broken-promise", 0.0)
        return self._random.randint(count + 1, len(keys)) if self._promised else count

    def kept(self, keys: Sequence[bytes]) -> int:
        return self._store.kept(keys)

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview], giver: str = "") -> int:
        index = self._random.randrange(len(self._givers))
        peer, fault = self._givers[index], self._fault(_OF_READ)
        if self._promised:
            giver, self._promised = peer.engine_id.hex(), False
            peer.seen["broken-promise"] += 1
        self._prepare(peer, fault, keys)
        for each, left in zip(self._givers, self._dead_for, strict=True):
            if left:
                each.fault = "dead"
        if fault == "dead":
            self._dead_for[index] = self._random.randrange(2, 8)
        count = self._store.read(keys, into, giver)
        for each in self._givers:
            each.fault = None
        for buffer in into[count:]:
            buffer[:] = self._random.randbytes(min(64, buffer.nbytes)).ljust(buffer.nbytes, b"\xa5")
        return count

    def write(self, keys: Sequence[bytes], blocks: Sequence[Sequence[memoryview]]) -> int:
        for giver in self._givers:
            if self._random.random() < 0.6:
                giver.store.write(keys, blocks)
        return self._store.write(keys, blocks)

    def counts(self) -> StoreCounts:
        return self._store.counts()

    def close(self) -> None:
        self._store.close()

    def _prepare(self, giver: Giver, fault: PeerFault | None, keys: Sequence[bytes]) -> None:
        match fault:
            case "restarted":
                giver.restart()
            case "leases-end":
                giver.end_leases()
            case "vanishes":
                giver.vanish(keys, self._clock)
            case "junk":
                giver.junk()
            case _:
                giver.fault = fault
                return
        giver.seen[fault] += 1

    def _hear_news(self, keys: Sequence[bytes]) -> None:
        """Time passes, and peers say what they have, some with a fault."""
        self._has_news = True
        self._clock.advance(1.0)
        for index, (giver, peer) in enumerate(zip(self._givers, self._peers, strict=True)):
            giver.clock.advance(1.0)
            self._dead_for[index] -= self._dead_for[index] > 0
            giver.lost = keys
            giver.fault = "dead" if self._dead_for[index] else self._fault(_OF_NEWS)
            peer.follow(once=True)
            giver.fault = None

    def _fault(self, kinds: Sequence[PeerFault]) -> PeerFault | None:
        for kind in self._random.sample(kinds, len(kinds)):
            if self._random.random() < self._rates.get(kind, 0.0):
                return kind
        return None

    def _pass_time(self) -> None:
        """More than a taker waits for."""
        self._clock.advance(2 * self._timeout_s)
        self._wait(2.0)
