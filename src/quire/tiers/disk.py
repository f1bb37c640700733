"""`DiskStore`: blocks in segments of a folder, kept over restarts and shared by the processes of one machine.

A process writes one segment of its own at a time and reads those of all. What others have written, sealed or removed
is learned once per second. Nothing is synchronized with the medium: after a loss of power a block is whole or is
found to be damaged, and then it is computed again.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from quire.clock import Clock, WallClock
from quire.metrics.log import Log
from quire.tiers.folder import TierFolder
from quire.tiers.index import BlockIndex
from quire.tiers.record import header_of, short_root
from quire.tiers.segment import SegmentFile
from quire.tiers.spans import read_ahead, spans_of
from quire.tiers.store import StoreCounts
from quire.tiers.writer import SegmentWriter

REFRESH_S = 1.0
log = Log("kv-disk")


class DiskStore:
    """The store of one root (a model, with all that its KV depends on) in a folder that several roots share."""

    name = "disk"

    def __init__(
        self,
        folder: Path,
        size_bytes: int,
        root: str,
        *,
        allows_network: bool = False,
        clock: Clock | None = None,
        refreshes: bool = True,
    ) -> None:
        """``size_bytes``: the bound of the whole folder. ``refreshes``: a thread calls `refresh` once per second.

        Raises:
            ConfigError: the folder or the root cannot be used.
        """
        self._clock = clock or WallClock()
        self._index = BlockIndex()
        self._counts = StoreCounts()
        self._counting = threading.Lock()
        self._refreshing = threading.Lock()
        self._writing = threading.Lock()
        self._closed = threading.Event()
        self._retry_at_s = float("-inf")
        self._num_failures = 0
        tier = TierFolder(folder, size_bytes, allows_network=allows_network)
        self._folder = tier.root(root)
        self._tier = tier
        self._root = short_root(root)
        self._writer = SegmentWriter(tier, self._folder, self._root, self._index)
        self._executor = ThreadPoolExecutor(2, "quire-kv-read")
        self._adopt()
        self.refresh()
        if refreshes:
            threading.Thread(target=self._keep_fresh, name="quire-kv-refresh", daemon=True).start()

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys the index has."""
        return self._index.num_leading(keys)

    def kept(self, keys: Sequence[bytes]) -> int:
        """As `contains`."""
        return self.contains(keys)

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview], giver: str = "") -> int:
        """Fill one buffer per key; return how many leading blocks are whole."""
        places = self._index.leading(keys)
        for index, (place, buffer) in enumerate(zip(places, into, strict=False)):
            if place.entry.num_bytes != buffer.nbytes:
                self._index.drop(place)
                self._count(blocks_damaged=1)
                places = places[:index]
                break
        num_whole = 0
        with closing(read_ahead(spans_of(places, into[: len(places)]), self._executor)) as results:
            for span, result in results:
                count = 0 if isinstance(result, OSError) else span.num_whole(result)
                num_whole += count
                span.file.is_hit = True
                if count < len(span.entries):
                    self._index.drop(places[num_whole])
                    failure = "read_errors" if isinstance(result, OSError) else "blocks_damaged"
                    self._count(**{failure: 1})
                    break
        self._count(blocks_read=num_whole, bytes_read=sum(buffer.nbytes for buffer in into[:num_whole]))
        return num_whole

    def write(self, keys: Sequence[bytes], blocks: Sequence[Sequence[memoryview]]) -> int:
        """Append the blocks that the index does not have; return how many leading ones it then has.

        Blocks that are there already count as hit, and no block of this call makes room for another one of it.
        """
        with self._writing:
            spared: set[Path] = set()
            for place in self._index.leading(keys):
                place.file.is_hit = True
                spared.add(place.file.path)
            for index, (key, block) in enumerate(zip(keys, blocks, strict=True)):
                if key not in self._index and not self._append(key, block, spared):
                    self._count(blocks_refused=len(keys) - index)
                    break
        return self._index.num_leading(keys)

    def counts(self) -> StoreCounts:
        """Return the sums, and what all processes have under this root now."""
        files = list(self._index.files.values())
        size = sum(file.size() for file in files)
        return replace(
            self._counts,
            blocks_evicted=self._index.num_evicted,
            wear_bytes=self._writer.wear_bytes,
            num_blocks=len(self._index),
            size_bytes=size,
        )

    def refresh(self) -> None:
        """Take in what other processes have written and removed, and tell them what was hit."""
        with self._refreshing:
            if self._closed.is_set():
                return
            self._mark_hits()
            try:
                infos = self._tier.segments(self._folder)
            except FileNotFoundError:
                infos = []
            except OSError:
                self._count(read_errors=1)
                return
            listed = {info.path for info in infos}
            self._index.forget(self._index.files.keys() - listed)
            for path in listed - self._index.files.keys():
                with suppress(OSError):
                    self._index.add(SegmentFile.open(path, self._root), ())
            for file in list(self._index.files.values()):
                if not file.is_own:
                    with suppress(OSError):
                        self._index.add(file, file.new_entries())

    def close(self) -> None:
        """Seal the segment that is being written, and forget all others."""
        if self._closed.is_set():
            return
        self._closed.set()
        with self._writing, self._refreshing:
            self._mark_hits()
            with suppress(OSError):
                self._writer.seal()
            self._index.clear()
        self._executor.shutdown(wait=False)

    def _append(self, key: bytes, block: Sequence[memoryview], spared: set[Path]) -> bool:
        """Write one block; say whether it is kept."""
        if self._closed.is_set() or self._clock.now() < self._retry_at_s:
            return False
        num_bytes = sum(part.nbytes for part in block)
        try:
            if not (self._writer.has_room(num_bytes) or self._begin(num_bytes, spared)):
                return False
            entry = self._writer.append(key, [header_of(self._root, key, block), *block], num_bytes)
        except OSError as error:
            self._failed(error)
            return False
        self._num_failures = 0
        assert self._writer.file is not None
        self._index.add(self._writer.file, (entry,))
        spared.add(self._writer.file.path)
        self._count(blocks_written=1, bytes_written=num_bytes)
        return True

    def _begin(self, num_bytes: int, spared: set[Path]) -> bool:
        """Begin a segment; say whether there is room for it. Raises `OSError`."""
        with self._refreshing:
            self._mark_hits()
            self._writer.seal()
            if not self._writer.begin(num_bytes, spared):
                return False
            assert self._writer.file is not None
            self._index.add(self._writer.file, ())
        return True

    def _failed(self, error: OSError) -> None:
        """Give the segment up as it is, and pause: the disk is full, cannot be written, or is gone.

        The pause doubles from one second to a minute.
        """
        self._writer.abandon()
        self._count(write_errors=1)
        if self._num_failures == 0:
            log.warning(
                "writing_paused", folder=str(self._folder), error=errno.errorcode.get(error.errno or 0, "")
            )
        self._retry_at_s = self._clock.now() + REFRESH_S * 2.0 ** min(self._num_failures, 6)
        self._num_failures += 1

    def _count(self, **amounts: int) -> None:
        with self._counting:
            for name, amount in amounts.items():
                setattr(self._counts, name, getattr(self._counts, name) + amount)

    def _mark_hits(self) -> None:
        """Let the modification times of segments say when they were hit."""
        for file in list(self._index.files.values()):
            if file.is_hit:
                file.is_hit = False
                with suppress(OSError):  # a folder that may only be read
                    os.utime(file.fd)

    def _adopt(self) -> None:
        """Seal what killed writers left."""
        with suppress(OSError), self._tier.locked() as is_locked:
            for info in self._tier.segments(self._folder) if is_locked else ():
                with suppress(OSError):
                    SegmentFile.open(info.path, self._root, writes=True).recover()

    def _keep_fresh(self) -> None:
        while not self._closed.wait(REFRESH_S):
            self.refresh()
