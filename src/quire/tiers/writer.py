"""The segment that a process is writing: begun with room made for it, filled, sealed."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Container, Sequence
from contextlib import suppress
from pathlib import Path

from quire.tiers.folder import TierFolder
from quire.tiers.index import BlockIndex
from quire.tiers.segment import SUFFIX, Entry, SegmentFile, bytes_for
from quire.tiers.spans import SPAN_BYTES

# Segments per folder: what is removed at once is this share of the bound.
SEGMENTS_PER_FOLDER = 64


class SegmentWriter:
    """At most one segment at a time. Calls come from one thread at a time; all raise `OSError`."""

    def __init__(self, tier: TierFolder, folder: Path, root: bytes, index: BlockIndex) -> None:
        """``index`` forgets the segments that are removed to make room."""
        self.file: SegmentFile | None = None
        self.wear_bytes = 0
        self._tier = tier
        self._folder = folder
        self._root = root
        self._index = index
        self._name = secrets.token_hex(6)
        self._num_begun = 0
        self._capacity = 0
        self._entries: list[Entry] = []
        self._payload_bytes = 0

    def has_room(self, num_bytes: int) -> bool:
        """Whether a block fits into the segment, which is still there."""
        if self.file is None or self.file.is_removed:
            return False
        return bytes_for(len(self._entries) + 1, self._payload_bytes + num_bytes) <= self._capacity

    def begin(self, num_bytes: int, spared: Container[Path]) -> bool:
        """Begin a segment for a block of ``num_bytes`` and more; False where there is no room beside those spared."""
        bound = self._tier.size_bytes
        capacity = max(bound // SEGMENTS_PER_FOLDER, min(SPAN_BYTES, bound) // 4, bytes_for(1, num_bytes))
        with self._tier.locked() as is_locked:
            if not is_locked or not self._make_room(capacity, spared):
                return False
            try:
                self.file = self._create(capacity)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                # The disk is fuller than the bound says: this folder gets smaller.
                if not self._make_room(capacity, spared, evicts_one=True):
                    raise
                self.file = self._create(capacity)
        self._capacity, self._entries, self._payload_bytes = capacity, [], 0
        return True

    def append(self, key: bytes, buffers: Sequence[bytes | memoryview], num_bytes: int) -> Entry:
        """Write a block of ``num_bytes`` behind its header, the first buffer."""
        assert self.file is not None
        entry = Entry(key, self.file.indexed_end, num_bytes)
        self.file.append(buffers, entry.end - entry.offset)
        self._entries.append(entry)
        self._payload_bytes += num_bytes
        self.wear_bytes += entry.end - entry.offset
        return entry

    def seal(self) -> None:
        """End the segment, if there is one. It stays readable."""
        file, entries = self.file, self._entries
        if file is None:
            return
        self.file = None
        if file.is_removed or not entries:
            file.path.unlink(missing_ok=True)
            return
        self.wear_bytes += file.seal(entries)
        written = os.fstat(file.fd).st_size
        with self._tier.locked() as is_locked:
            if is_locked:
                self._tier.add_wear(written)

    def _make_room(self, num_bytes: int, spared: Container[Path], *, evicts_one: bool = False) -> bool:
        removed = self._tier.make_room(num_bytes, spared, evicts_one=evicts_one)
        self._index.forget(removed or ())  # an open file would keep its room on the disk
        return removed is not None

    def _create(self, capacity: int) -> SegmentFile:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path = self._folder / f"{self._name}-{self._num_begun:05d}{SUFFIX}"
        self._num_begun += 1
        return SegmentFile.create(path, self._root, capacity)

    def abandon(self) -> None:
        """End the segment after a failure, if need be without its table, which the next start then adds."""
        file = self.file
        try:
            self.seal()
        except OSError:
            if file is not None:
                with suppress(OSError):
                    file.unlock()
