"""Files of packed weights: matrices as they lay in memory, ready for the kernels, with checksums. Torch-free.

    | magic | u64 size of the header | header, JSON | 0 … 4095 bytes | parts, each from a multiple of 4096 |
    | u64 XXH64 of each MiB of each part | u64 XXH64 of the header and of these |

A file gets its name once it is whole and synced. Every byte that is used is checked as it is read: a file that is torn,
short, flipped in a bit or of another version is `Unusable`, and its weights are made again.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quire.units import MIB

try:
    from quire import _native as native
except ImportError:
    native = None  # type: ignore[assignment]

SUFFIX = ".packed"
_MAGIC = b"QUIREPW1"
_PAGE = 4096
_PIECE = MIB  # bytes per read, write and sum


class Unusable(Exception):
    """What is wrong with a file."""


class Region(NamedTuple):
    """Memory of one part of a matrix, which the caller keeps alive."""

    address: int
    num_bytes: int


class _Piece(NamedTuple):
    offset: int  # in the file
    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where everything is in the file of ``regions``."""

    header: bytes
    pieces: list[_Piece]
    sums_at: int

    @staticmethod
    def of(key: str, regions: Sequence[Region]) -> _Layout:
        header = json.dumps({"key": key, "sizes": [region.num_bytes for region in regions]}).encode()
        pieces, at = [], len(_MAGIC) + 8 + len(header)
        for address, num_bytes in regions:
            at = -(-at // _PAGE) * _PAGE
            for start in range(0, num_bytes, _PIECE):
                pieces.append(_Piece(at + start, address + start, min(_PIECE, num_bytes - start)))
            at += num_bytes
        return _Layout(_MAGIC + len(header).to_bytes(8, "little") + header, pieces, at)

    @property
    def num_bytes(self) -> int:
        return self.sums_at + 8 * len(self.pieces) + 8


def read(path: Path, key: str, regions: Sequence[Region], num_threads: int) -> None:
    """Fill ``regions`` with what `write` was given under the same ``key``.

    Raises:
        FileNotFoundError: there is no such file.
        Unusable: what is wrong with it. The regions may hold any part of it then.
    """
    layout = _Layout.of(key, regions)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sums = _read_sums(fd, layout)
        share = -(-len(sums) // num_threads)
        parts = [
            (layout.pieces[start : start + share], sums[start : start + share])
            for start in range(0, len(sums), share)
        ]
        with ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(lambda part: _read_pieces(fd, *part), parts))
    except OSError as error:
        raise Unusable(str(error)) from error
    finally:
        os.close(fd)


def _read_sums(fd: int, layout: _Layout) -> list[int]:
    """Return the checksum of each piece, from a file whose header and size are those of ``layout``."""
    size = os.fstat(fd).st_size
    if size != layout.num_bytes:
        raise Unusable(f"it has {size} bytes in place of {layout.num_bytes}")
    header = os.pread(fd, len(layout.header), 0)
    if header != layout.header:
        raise Unusable("its header is another one")
    tail = os.pread(fd, size - layout.sums_at, layout.sums_at)
    words = [int.from_bytes(tail[at : at + 8], "little") for at in range(0, len(tail), 8)]
    if len(tail) != size - layout.sums_at or _sum_of(header + tail[:-8]) != words[-1]:
        raise Unusable("its checksums are damaged")
    return words[:-1]


def _read_pieces(fd: int, pieces: Sequence[_Piece], sums: Sequence[int]) -> None:
    assert native is not None
    for piece, expected in zip(pieces, sums, strict=True):
        memory, done = _memory(piece), 0
        while done < piece.num_bytes:
            count = os.preadv(fd, [memory[done:]], piece.offset + done)
            if not count:
                raise Unusable(f"it ends at byte {piece.offset + done}")
            done += count
        if native.checksum(piece.address, piece.num_bytes) != expected:
            raise Unusable(f"bytes {piece.offset} to {piece.offset + piece.num_bytes} are damaged")


def write(
    path: Path, key: str, regions: Sequence[Region], may_write: Callable[[], bool], is_right: Callable[[], bool]
) -> bool:  # fmt: skip
    """Write ``regions`` to ``path``; return whether the file is there now.

    ``may_write`` is asked before each MiB, and may wait; ``is_right`` once all is written, before the file gets its
    name. If either says no, nothing is left behind. Where another process writes the same file, it is left to it.

    Raises:
        OSError: of the disk or the folder; nothing is left behind.
    """
    assert native is not None
    layout = _Layout.of(key, regions)
    with _being_written(path) as fd:
        if fd is None:
            return path.exists()
        os.pwrite(fd, layout.header, 0)
        sums = bytearray()
        for piece in layout.pieces:
            if not may_write():
                return False
            # Of the bytes in memory, so that a fault on their way to the disk shows when they are read.
            sums += native.checksum(piece.address, piece.num_bytes).to_bytes(8, "little")
            _write_all(fd, _memory(piece), piece.offset)
        sums += _sum_of(layout.header + sums).to_bytes(8, "little")
        _write_all(fd, memoryview(sums), layout.sums_at)
        os.fsync(fd)
        if not is_right():
            return False
        _part(path).replace(path)
        _sync_folder(path.parent)
    return True


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


@contextlib.contextmanager
def _being_written(path: Path) -> Iterator[int | None]:
    """Open and lock the file that becomes ``path``; None: another one has it. Remove it if it got no name."""
    part = _part(path)
    fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        if not _is_at(fd, part):  # its writer has just given it its name, or removed it
            yield None
            return
        try:
            os.ftruncate(fd, 0)  # a writer that was killed may have left something
            yield fd
        finally:
            if _is_at(fd, part):
                part.unlink()
    finally:
        os.close(fd)


def _part(path: Path) -> Path:
    return path.with_suffix(".part")


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    """Have the new name survive a power failure; some file systems cannot, and then the file may be missing after."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _memory(piece: _Piece) -> memoryview:
    return memoryview((ctypes.c_uint8 * piece.num_bytes).from_address(piece.address)).cast("B")


def _sum_of(data: bytes | bytearray) -> int:
    assert native is not None
    buffer = bytearray(data)
    return native.checksum(ctypes.addressof((ctypes.c_uint8 * len(buffer)).from_buffer(buffer)), len(buffer))


def packed_folder() -> Path:
    """Return the folder of ``--packed-cache auto``: ``$XDG_CACHE_HOME/quire/packed``.

    Raises:
        OSError: this user has no home, and nothing says where else.
    """
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError(f"{error} Set HOME, XDG_CACHE_HOME or --packed-cache") from error
    return Path(base) / "quire" / "packed"


class Entry(NamedTuple):
    """A file of the folder."""

    path: Path
    num_bytes: int
    used_s: float  # when it was last read or written, in seconds since 1970


def entries(folder: Path) -> list[Entry]:
    """Return the files of ``folder``, the one that was not used for the longest time first."""
    present = []
    with contextlib.suppress(OSError):
        for path in folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                present.append(Entry(path, stat.st_size, stat.st_mtime))
    return sorted(present, key=lambda entry: entry.used_s)


def make_room(folder: Path, num_bytes: int, max_bytes: int) -> None:
    """Remove what killed writers left, and the files that were not used for the longest time, for ``num_bytes`` more.

    Raises:
        OSError: a file cannot be removed.
    """
    for part in folder.glob("*.part"):
        with part.open("rb") as file, contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink(missing_ok=True)
    present = entries(folder)
    total = sum(entry.num_bytes for entry in present) + num_bytes
    for entry in present:
        if total <= max_bytes:
            return
        entry.path.unlink(missing_ok=True)
        total -= entry.num_bytes
