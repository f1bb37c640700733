"""`PeerStore`: the blocks that an engine shares with its peers, and those that they share with it.

What is written stays in this process's memory, from which peers take it (`PeerServer`); what is read comes from there
or from a peer that has it. Which peers there are is a setting: no request says where bytes come from.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

from quire.errors import ConfigError
from quire.tiers.memory import MemoryStore
from quire.tiers.peer import Peer
from quire.tiers.peer_server import PeerServer
from quire.tiers.store import StoreCounts


class PeerStore:
    """The store of an engine with peers."""

    name = "peers"

    def __init__(
        self, own: MemoryStore, server: PeerServer | None, peers: Sequence[Peer], *, patience_s: float = 0.5
    ) -> None:
        """``server``: gives the blocks of ``own`` away; closed with this.

        ``patience_s``: for each block that a peer is to have soon.
        """
        self._own, self._server, self._peers = own, server, tuple(peers)
        self._patience_s = patience_s

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys are here or with a peer, as far as it is known."""
        return next((index for index, key in enumerate(keys) if self._place_of(key) is None), len(keys))

    def kept(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys are here."""
        return self._own.contains(keys)

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview], giver: str = "") -> int:
        """Fill buffers from here and from peers, in runs of blocks that one place has.

        ``giver``: the engine id of a peer that is asked for blocks that are nowhere yet.
        """
        first = 0
        while first < len(keys):
            place = self._place_of(keys[first])
            if place is None:
                peer = next((peer for peer in self._peers if giver and peer.engine_id == giver), None)
                if peer is not None:
                    first += peer.read(keys[first:], into[first:], self._patience_s)
                break
            run = self._run_of(place, keys, first)
            count = place.read(keys[first : first + run], into[first : first + run])
            first += count
            if not count and self._place_of(keys[first]) is place:  # it says so, and does not give it
                break
        return first

    def write(self, keys: Sequence[bytes], blocks: Sequence[Sequence[memoryview]]) -> int:
        """Keep blocks here."""
        return self._own.write(keys, blocks)

    def counts(self) -> StoreCounts:
        """Return the sums over this engine's memory and the peers; what there is now is this engine's."""
        total = self._own.counts()
        for peer in self._peers:
            for field in fields(StoreCounts):
                setattr(total, field.name, getattr(total, field.name) + getattr(peer.counts, field.name))
        return total

    def close(self) -> None:
        """Give and take nothing more."""
        if self._server is not None:
            self._server.close()
        for peer in self._peers:
            peer.close()
        self._own.close()

    def _place_of(self, key: bytes) -> MemoryStore | Peer | None:
        if self._own.contains([key]):
            return self._own
        return next((peer for peer in self._peers if peer.has(key)), None)

    def _run_of(self, place: MemoryStore | Peer, keys: Sequence[bytes], first: int) -> int:
        """Return how many blocks from ``first`` on ``place`` has, of which all but the first are only here."""
        if isinstance(place, MemoryStore):
            return place.contains(keys[first:])
        is_there = (place.has(key) and not self._own.contains([key]) for key in keys[first:])
        return next((count for count, there in enumerate(is_there) if not there), len(keys) - first)


def address_of(setting: str, param: str) -> tuple[str, int]:
    """Read HOST:PORT.

    Raises:
        ConfigError: it has another form.
    """
    host, _, port = setting.rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) < 65_536:
        raise ConfigError(f"{param}: {setting!r} must be HOST:PORT, as 10.0.0.7:9500", param=param)
    return host.strip("[]"), int(port)


def shared_secret(min_bytes: int = 16) -> bytes:
    """Return the secret of this engine and its peers: QUIRE_KV_SECRET, or what the file QUIRE_KV_SECRET_FILE has.

    Raises:
        ConfigError: there is none, or it is short.
    """
    secret = os.environ.get("QUIRE_KV_SECRET", "").encode()
    if not secret and (name := os.environ.get("QUIRE_KV_SECRET_FILE")):
        with suppress(OSError):
            secret = Path(name).read_bytes().strip()
    if len(secret) < min_bytes:
        raise ConfigError(
            f"kv_share needs a secret of at least {min_bytes} bytes that all peers have: set QUIRE_KV_SECRET, "
            "or QUIRE_KV_SECRET_FILE to the file that has it",
            param="kv_share",
        )
    return secret


def open_peers(address: str, size_bytes: int, peers: Sequence[str], root: str, engine_id: str) -> PeerStore:
    """Share ``size_bytes`` of blocks at ``address``, and take from ``peers``.

    Raises:
        ConfigError: an address or the secret cannot be used.
    """
    secret = shared_secret()
    others = [address_of(peer, "kv_peers") for peer in peers]
    own = MemoryStore(size_bytes, root)
    server = PeerServer(own, address_of(address, "kv_share"), root, secret, bytes.fromhex(engine_id))
    return PeerStore(own, server, [Peer(other, root, secret) for other in others])
