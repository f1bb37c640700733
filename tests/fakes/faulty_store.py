"""`FaultyStore`: a store of KV blocks that loses, delays, damages and lies, on a seed.

It wraps a real store. Faults of the medium are done to the real segment files, so what a store promises about them is
part of the test; a store's lies are those that its protocol allows, or that a careful caller survives:

    slow-read, slow-write    an operation takes long
    hang                     a read takes very long
    read-loss                fewer blocks than there are
    write-loss               fewer blocks are kept than were given, and the caller is told
    write-lie                blocks are said to be kept, and are not
    contains-more            every key is said to be there
    contains-less            no key is said to be there
    dead                     for the next operations nothing is found or kept
    raises                   an exception, which the protocol rules out
    flip, cut                a byte of a segment changes; a segment ends early
    removed                  the segments of the folder are removed
    other-size               another process wrote a block of another size under the key
    killed                   the process was killed in the middle of a write, and the store is opened anew
    full                     the disk has no room for a while

What the buffers hold after the blocks that were read is always spoiled.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal, get_args

from quire.tiers.contents import clear
from quire.tiers.disk import DiskStore
from quire.tiers.segment import SUFFIX
from quire.tiers.store import StoreCounts

Fault = Literal[
    "slow-read", "slow-write", "hang", "read-loss", "write-loss", "write-lie", "contains-more", "contains-less",
    "dead", "raises", "flip", "cut", "removed", "other-size", "killed", "full",
]  # fmt: skip
FAULTS: tuple[Fault, ...] = get_args(Fault)
_OF_CONTAINS: tuple[Fault, ...] = ("contains-more", "contains-less")
_OF_READ: tuple[Fault, ...] = (
    "slow-read",
    "hang",
    "read-loss",
    "dead",
    "raises",
    "flip",
    "cut",
    "removed",
    "killed",
)
_OF_WRITE: tuple[Fault, ...] = (
    "slow-write", "write-loss", "write-lie", "dead", "raises", "removed", "other-size", "killed", "full",
)  # fmt: skip


class FaultyStore:
    """A `DiskStore` in ``folder`` with faults. Each operation has at most one.

    ``rates``: probability of a fault per operation in which it may happen; 0 for those that are not named. ``wait`` is
    called with the seconds of a delay. ``seed`` is in the message of a failure that the caller prints.
    """

    name = "disk"

    def __init__(
        self,
        folder: Path,
        size_bytes: int,
        root: str,
        *,
        rates: Mapping[Fault, float],
        seed: int,
        wait: Callable[[float], object],
        slow_s: float = 0.01,
        hang_s: float = 1.0,
    ) -> None:
        self.seen: Counter[Fault] = Counter()
        self.seed = seed
        self._open = lambda: DiskStore(folder, size_bytes, root, refreshes=False)
        self._folder = folder
        self._root = root
        self._store = self._open()
        self._rates = rates
        self._random = random.Random(seed)
        self._wait = wait
        self._slow_s = slow_s
        self._hang_s = hang_s
        self._dead = 0  # operations left
        self._lock = threading.Lock()

    def contains(self, keys: Sequence[bytes]) -> int:
        if self._is_dead():
            return 0
        match self._fault(_OF_CONTAINS):
            case "contains-more":
                return len(keys)
            case "contains-less":
                return 0
        return self._store.contains(keys)

    def kept(self, keys: Sequence[bytes]) -> int:
        return self.contains(keys)

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview], giver: str = "") -> int:
        count = 0 if self._is_dead() else self._read(keys, into)
        for buffer in into[count:]:
            buffer[:] = self._random.randbytes(min(64, buffer.nbytes)).ljust(buffer.nbytes, b"\xa5")
        return count

    def write(self, keys: Sequence[bytes], blocks: Sequence[Sequence[memoryview]]) -> int:
        if self._is_dead():
            return 0
        with self._lock:
            some = self._random.randrange(max(1, len(keys)))
        match self._fault(_OF_WRITE):
            case "slow-write":
                self._wait(self._slow_s)
            case "write-loss":
                keys, blocks = keys[:some], blocks[:some]
            case "write-lie":
                self._store.write(keys[:some], blocks[:some])
                return len(keys)
            case "dead":
                return self._die()
            case "raises":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            case "removed":
                clear(self._folder)
                self._store.refresh()
            case "other-size":
                with closing(self._open()) as other:
                    other.write(keys[:1], [[*blocks[0], memoryview(b"!")]] if blocks else [])
                self._store.refresh()
            case "killed":
                self._store.write(keys[:some], blocks[:some])
                self._kill(torn=True)
                return 0
            case "full":
                return self._write_on_full_disk(keys, blocks)
        return self._store.write(keys, blocks)

    def counts(self) -> StoreCounts:
        return self._store.counts()

    def refresh(self) -> None:
        self._store.refresh()

    def close(self) -> None:
        self._store.close()

    def _read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        with self._lock:
            some = self._random.randrange(max(1, len(keys)))
        match self._fault(_OF_READ):
            case "slow-read":
                self._wait(self._slow_s)
            case "hang":
                self._wait(self._hang_s)
            case "read-loss":
                keys, into = keys[:some], into[:some]
            case "dead":
                return self._die()
            case "raises":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            case "flip" | "cut" as kind:
                self._damage(kind)
            case "removed":
                clear(self._folder)
                self._store.refresh()
            case "killed":
                self._kill(torn=False)
        return self._store.read(keys, into)

    def _fault(self, kinds: Sequence[Fault]) -> Fault | None:
        with self._lock:
            for kind in self._random.sample(kinds, len(kinds)):
                if self._random.random() < self._rates.get(kind, 0.0):
                    self.seen[kind] += 1
                    return kind
        return None

    def _is_dead(self) -> bool:
        with self._lock:
            self._dead -= self._dead > 0
            return self._dead > 0

    def _die(self) -> int:
        with self._lock:
            self._dead = self._random.randrange(2, 10)
        return 0

    def _damage(self, kind: str) -> None:
        with self._lock:
            paths = sorted(self._folder.rglob(f"*{SUFFIX}"))
            path = self._random.choice(paths) if paths else None
            place, bit = self._random.random(), 1 << self._random.randrange(8)
        if path is None:
            return
        with path.open("r+b") as file:
            written = _written_bytes(path)
            if kind == "cut":
                file.truncate(int(place * written))
                return
            offset = int(place * written)
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ bit]) if byte else b"")

    def _kill(self, *, torn: bool) -> None:
        """Open the store anew, the old one's segment not being sealed; ``torn``: half a block follows its last one."""
        with self._lock:
            for path in sorted(self._folder.rglob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)[
                -1:
            ]:
                with path.open("r+b") as file:
                    file.seek(_written_bytes(path))
                    file.write(b"QKB1" + self._random.randbytes(200) if torn else b"")
            # The last reference to the old one, and with it the files and their locks, goes with its last operation.
            self._store = self._open()

    def _write_on_full_disk(self, keys: Sequence[bytes], blocks: Sequence[Sequence[memoryview]]) -> int:
        """Write through a store whose bound is reached: it keeps no block."""
        with closing(DiskStore(self._folder, 1, self._root, refreshes=False)) as full:
            return full.write(keys, blocks)


def _written_bytes(path: Path) -> int:
    """Return the length of a segment without what is reserved behind its blocks."""
    data = path.read_bytes()
    return len(data.rstrip(b"\0"))
