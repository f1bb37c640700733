"""What peers say to each other over TCP: a proof of the shared secret by both, then questions and answers.

    taker → giver   magic 4 | nonce 32
    giver → taker   magic 4 | nonce 32 | engine id 16 | proof 32
    taker → giver   root 16 | proof 32
    giver → taker   1: go on; 0: it has blocks of another root

    C   since 8 | wait in ms 4          →  now 8 | is all 1 | added 4 | removed 4 | bytes of keys 4 | keys
    R   wait in ms 4 | keys 4 | bytes of keys 4 | keys
                                        →  per key: 1, header and payload of the block, or 0: no more

Integers are little-endian; a key is its length in one byte and its bytes. A proof is an HMAC of all that was said
before and of whose proof it is, so none can be sent back or again. The secret itself is never sent. A peer without it
is told nothing but an engine's id. What is sent is not encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from collections.abc import Sequence
from hashlib import sha256

from quire.clock import Clock
from quire.tiers.segment import MAX_BUFFERS
from quire.tiers.store import MAX_KEY_BYTES

MAGIC = b"QKP1"
CHANGES, READ = b"C", b"R"
_HELLO = struct.Struct("<4s32s")
_ANSWER = struct.Struct("<4s32s16s")
_CLAIM = struct.Struct("<16s")
_CHANGES = struct.Struct("<QI")
_CHANGED = struct.Struct("<Q?III")
_READ = struct.Struct("<III")


class PeerError(Exception):
    """The other side is no peer, or does not keep to the protocol."""


class Channel:
    """A connection whose calls end in time: `OSError` where `limit` has passed, or the other side is gone."""

    def __init__(self, sock: socket.socket, clock: Clock) -> None:
        self._sock, self._clock = sock, clock
        self._until_s = 0.0

    def limit(self, seconds: float) -> None:
        """Let all calls from now on end within ``seconds``."""
        self._until_s = self._clock.now() + seconds

    def send(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """Send buffers one after another."""
        views = [memoryview(part) for part in parts if len(part)]
        first = 0
        while first < len(views):
            self._set_timeout()
            num_sent = self._sock.sendmsg(views[first : first + MAX_BUFFERS])
            while first < len(views) and num_sent >= views[first].nbytes:
                num_sent -= views[first].nbytes
                first += 1
            if num_sent:
                views[first] = views[first][num_sent:]

    def receive_into(self, buffer: memoryview) -> None:
        """Fill a buffer."""
        num_received = 0
        while num_received < buffer.nbytes:
            self._set_timeout()
            count = self._sock.recv_into(buffer[num_received:])
            if not count:
                raise ConnectionError("the peer has closed the connection")
            num_received += count

    def receive(self, num_bytes: int) -> bytes:
        """Return so many bytes."""
        data = bytearray(num_bytes)
        self.receive_into(memoryview(data))
        return bytes(data)

    def _set_timeout(self) -> None:
        left_s = self._until_s - self._clock.now()
        if left_s <= 0.0:
            raise TimeoutError("the peer takes too long")
        self._sock.settimeout(left_s)


def meet_giver(channel: Channel, secret: bytes, root: bytes) -> bytes | None:
    """Prove the secret to the peer that was called, and let it prove it; return its engine id.

    None: it has blocks of another root.

    Raises:
        PeerError: it has another secret, or is no peer.
        OSError: it does not answer.
    """
    hello = _HELLO.pack(MAGIC, secrets.token_bytes(32))
    channel.send([hello])
    answer = channel.receive(_ANSWER.size)
    proof = channel.receive(sha256().digest_size)
    if not answer.startswith(MAGIC):
        raise PeerError("it speaks another protocol, or another version")
    if not hmac.compare_digest(proof, _proof(secret, b"giver", hello + answer)):
        raise PeerError("it has another secret")
    channel.send([root, _proof(secret, b"taker", hello + answer + root)])
    return _ANSWER.unpack(answer)[-1] if channel.receive(1) == b"\1" else None


def meet_taker(channel: Channel, secret: bytes, root: bytes, engine_id: bytes) -> bool:
    """Prove the secret to the peer that calls, and let it prove it; return whether it has the same root.

    Raises:
        PeerError: it has another secret, or is no peer.
        OSError: it does not answer.
    """
    hello = channel.receive(_HELLO.size)
    if not hello.startswith(MAGIC):
        raise PeerError("it speaks another protocol, or another version")
    answer = _ANSWER.pack(MAGIC, secrets.token_bytes(32), engine_id)
    channel.send([answer, _proof(secret, b"giver", hello + answer)])
    its_root, proof = channel.receive(_CLAIM.size), channel.receive(sha256().digest_size)
    if not hmac.compare_digest(proof, _proof(secret, b"taker", hello + answer + its_root)):
        raise PeerError("it has another secret")
    channel.send([b"\1" if its_root == root else b"\0"])
    return its_root == root


def ask_changes(channel: Channel, since: int, wait_s: float) -> tuple[int, bool, list[bytes], list[bytes]]:
    """Ask what has changed after the change ``since``: the last change, whether it is all, added and removed keys."""
    channel.send([CHANGES, _CHANGES.pack(since, int(wait_s * 1e3))])
    now, is_all, num_added, num_removed, num_bytes = _CHANGED.unpack(channel.receive(_CHANGED.size))
    keys = _receive_keys(channel, num_added + num_removed, num_bytes)
    return now, is_all, keys[:num_added], keys[num_added:]


def take_changes_question(channel: Channel) -> tuple[int, float]:
    """Return ``since`` and the seconds that the peer waits."""
    since, wait_ms = _CHANGES.unpack(channel.receive(_CHANGES.size))
    return since, wait_ms / 1e3


def send_changes(
    channel: Channel, now: int, is_all: bool, added: Sequence[bytes], removed: Sequence[bytes]
) -> None:
    """Answer `ask_changes`. Of too many keys some are not named."""
    added, removed = added[-(1 << 19) :], removed[-(1 << 19) :]
    keys = _listed([*added, *removed])
    channel.send([_CHANGED.pack(now, is_all, len(added), len(removed), len(keys)), keys])


def ask_blocks(channel: Channel, keys: Sequence[bytes], wait_s: float) -> None:
    """Ask for blocks, each of which may take ``wait_s`` to come into being."""
    listed = _listed(keys)
    channel.send([READ, _READ.pack(int(wait_s * 1e3), len(keys), len(listed)), listed])


def take_blocks_question(channel: Channel) -> tuple[float, list[bytes]]:
    """Return the seconds that the peer waits for each block, and the keys."""
    wait_ms, count, num_bytes = _READ.unpack(channel.receive(_READ.size))
    return wait_ms / 1e3, _receive_keys(channel, count, num_bytes)


def _listed(keys: Sequence[bytes]) -> bytes:
    return b"".join(bytes([len(key)]) + key for key in keys)


def _receive_keys(channel: Channel, count: int, num_bytes: int) -> list[bytes]:
    if count > 1 << 20 or num_bytes > count * (1 + MAX_KEY_BYTES):
        raise PeerError(f"it names {count} blocks in {num_bytes} bytes")
    data, keys, end = channel.receive(num_bytes), [], 0
    while end < num_bytes:
        start = end + 1
        end = start + data[end]
        if not start < end <= min(num_bytes, start + MAX_KEY_BYTES):
            raise PeerError("it has a key of another length")
        keys.append(data[start:end])
    if len(keys) != count:
        raise PeerError(f"it names {len(keys)} blocks, and not {count}")
    return keys


def _proof(secret: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, b"quire.kv.peer " + role + b"\0" + said, "sha256")
