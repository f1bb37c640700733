"""A segment: a file of blocks, one behind the other, that is written once from front to back.

    head 64 | header, payload | header, payload | …  end | table of all blocks | trailer 32

The head says up to which byte the segment is whole (``end``); a writer moves it after each append, so a reader in
another process never sees half a block. A sealed segment has a table behind its blocks, from which an index is built
with one read. Both only save time: each read checks the block's own header and payload.

A writer holds an exclusive lock on its file. A file that is neither sealed nor locked is what a killed writer left.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from quire.private import private_fd
from quire.tiers.checksum import crc32
from quire.tiers.record import HEADER_BYTES, read_header
from quire.tiers.store import MAX_KEY_BYTES

SUFFIX = ".seg"
_HEAD = struct.Struct("<4s2x?x16sQQ20xI")  # magic, sealed, root, end, capacity, checksum
_HEAD_MAGIC = b"QKS1"
_ENTRY = struct.Struct("<64sH6xQQ")  # key, bytes of key, offset of header, bytes of payload
_TRAILER = struct.Struct("<4s4xQQII")  # magic, end, entries, checksums of table and trailer
_TRAILER_MAGIC = b"QKT1"
HEAD_BYTES = _HEAD.size
# At most this many buffers go into one system call.
MAX_BUFFERS = os.sysconf("SC_IOV_MAX")


class Entry(NamedTuple):
    """Where a block lies."""

    key: bytes
    offset: int  # the header's
    num_bytes: int  # the payload's

    @property
    def end(self) -> int:
        return self.offset + HEADER_BYTES + self.num_bytes


class Head(NamedTuple):
    """The beginning of a segment's file."""

    root: bytes
    is_sealed: bool
    end: int
    capacity: int

    def packed(self) -> bytes:
        head = _HEAD.pack(_HEAD_MAGIC, self.is_sealed, self.root, self.end, self.capacity, 0)[:-4]
        return head + crc32(head).to_bytes(4, "little")


class SegmentFile:
    """A segment's open file. It is closed with the last reference, so a read never meets a reused descriptor."""

    def __init__(self, path: Path, fd: int, root: bytes) -> None:
        self.path = path
        self.root = root
        self.fd = fd
        # The index has all blocks below this offset.
        self.indexed_end = HEAD_BYTES
        self.is_sealed = False
        self.keys: list[bytes] = []
        # A block of it was read, or would have been written again.
        self.is_hit = False
        # It is made by this process, which therefore knows its blocks.
        self.is_own = False
        # Another process has removed it: it can be read, and is not worth writing to.
        self.is_removed = False

    def __del__(self) -> None:
        os.close(self.fd)

    @classmethod
    def open(cls, path: Path, root: bytes, *, writes: bool = False) -> SegmentFile:
        """Open a segment that is there. Raises `OSError`."""
        return cls(path, private_fd(path, os.O_RDWR if writes else os.O_RDONLY), root)

    @classmethod
    def create(cls, path: Path, root: bytes, capacity: int) -> SegmentFile:
        """Make a segment, lock it and reserve its bytes. Raises `OSError`: the disk is full, or cannot be written."""
        file = cls(path, private_fd(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), root)
        file.is_own = True
        try:
            fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(file.fd, 0, capacity)
            os.pwrite(file.fd, Head(root, False, HEAD_BYTES, capacity).packed(), 0)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return file

    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def head(self) -> Head | None:
        """Read the head; None where it is not one of this version and root. Raises `OSError`."""
        return _read_head(os.pread(self.fd, HEAD_BYTES, 0), self.root)

    def lock(self) -> bool:
        """Take the writer's lock if no one has it."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def unlock(self) -> None:
        """Give the writer's lock back. Raises `OSError`."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def is_being_written(self) -> bool:
        """Whether another open file of this segment has the writer's lock."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        self.unlock()
        return False

    def new_entries(self) -> list[Entry]:
        """Return the blocks that were added since the last call. Raises `OSError`."""
        if self.is_sealed:
            return []
        head = self.head()
        if head is None:  # damaged: the blocks speak for themselves
            self.is_sealed = True
            return list(self._scan(self.size()))
        if head.is_sealed:
            self.is_sealed = True
            table = self._table() if self.indexed_end == HEAD_BYTES else None
            if table is not None:
                self.indexed_end = head.end
                return table
        return list(self._scan(min(head.end, self.size())))

    def append(self, buffers: Sequence[bytes | memoryview], num_bytes: int) -> None:
        """Write behind the last block and make it visible. Raises `OSError`; then the segment is as before."""
        offset = self.indexed_end
        for start in range(0, len(buffers), MAX_BUFFERS):
            part = buffers[start : start + MAX_BUFFERS]
            written = os.pwritev(self.fd, part, offset)
            if written != sum(memoryview(each).nbytes for each in part):
                raise OSError(f"{self.path}: {written} bytes of a block were written.")
            offset += written
        assert offset - self.indexed_end == num_bytes
        self._set_head(Head(self.root, False, offset, self.size()))
        self.indexed_end = offset

    def seal(self, entries: Sequence[Entry]) -> int:
        """Write the table and give back what was reserved and not used. Returns bytes written. Raises `OSError`."""
        end = self.indexed_end
        table = b"".join(
            _ENTRY.pack(each.key, len(each.key), each.offset, each.num_bytes) for each in entries
        )
        tail = _TRAILER.pack(_TRAILER_MAGIC, end, len(entries), crc32(table), 0)[:-4]
        tail += crc32(tail).to_bytes(4, "little")
        written = os.pwrite(self.fd, table + tail, end)
        if written != len(table) + len(tail):
            raise OSError(f"{self.path}: {written} bytes of its table were written.")
        os.ftruncate(self.fd, end + written)
        self._set_head(Head(self.root, True, end, end + written))
        self.is_sealed = True
        self.unlock()
        return written + HEAD_BYTES

    def recover(self) -> None:
        """Seal the segment if its writer was killed; remove it if it has no block. Raises `OSError`."""
        head = self.head()
        if head is not None and not head.is_sealed and self.lock():
            entries = self.new_entries()
            if entries:
                self.seal(entries)
            else:
                self.path.unlink()

    def _set_head(self, head: Head) -> None:
        if os.pwrite(self.fd, head.packed(), 0) != HEAD_BYTES:
            raise OSError(f"{self.path}: its head was not written.")

    def _scan(self, end: int) -> Iterator[Entry]:
        """Yield the blocks of which the headers say that they end at or before ``end``, up to the first damage."""
        while self.indexed_end + HEADER_BYTES <= end:
            try:
                header = read_header(self.root, os.pread(self.fd, HEADER_BYTES, self.indexed_end))
            except OSError:
                return
            if header is None:
                return
            entry = Entry(header.key, self.indexed_end, header.num_bytes)
            if entry.end > end:
                return
            self.indexed_end = entry.end
            yield entry

    def _table(self) -> list[Entry] | None:
        """Return the table of a sealed segment, or None where it is damaged. Raises `OSError`."""
        size = self.size()
        if size < HEAD_BYTES + _TRAILER.size:
            return None
        tail = os.pread(self.fd, _TRAILER.size, size - _TRAILER.size)
        if len(tail) != _TRAILER.size or crc32(tail[:-4]) != int.from_bytes(tail[-4:], "little"):
            return None
        magic, end, num_entries, checksum, _ = _TRAILER.unpack(tail)
        num_bytes = num_entries * _ENTRY.size
        if magic != _TRAILER_MAGIC or end + num_bytes + _TRAILER.size != size:
            return None
        table = os.pread(self.fd, num_bytes, end)
        if len(table) != num_bytes or crc32(table) != checksum:
            return None
        entries = [
            Entry(key[:key_bytes], offset, length)
            for key, key_bytes, offset, length in _ENTRY.iter_unpack(table)
            if 0 < key_bytes <= MAX_KEY_BYTES
        ]
        return entries if all(each.offset >= HEAD_BYTES and each.end <= end for each in entries) else None


def bytes_for(num_blocks: int, num_bytes: int) -> int:
    """Return what a segment of blocks takes, with its table; ``num_bytes``: of all payloads together."""
    return HEAD_BYTES + num_bytes + num_blocks * (HEADER_BYTES + _ENTRY.size) + _TRAILER.size


def _read_head(data: bytes, root: bytes | None = None) -> Head | None:
    if len(data) != HEAD_BYTES or crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
        return None
    magic, is_sealed, its_root, end, capacity, _ = _HEAD.unpack(data)
    if magic != _HEAD_MAGIC or root not in (None, its_root) or end < HEAD_BYTES:
        return None
    return Head(its_root, is_sealed, end, capacity)


def head_of(path: Path) -> Head | None:
    """Return the head of a file, whatever its root; None where it is no segment. Raises `OSError`."""
    with path.open("rb") as file:
        return _read_head(file.read(HEAD_BYTES))
