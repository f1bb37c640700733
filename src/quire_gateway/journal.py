"""`Journal`: the requests of this gateway that the ledger has no row of yet, in a file that outlives the process.

The file is mapped into memory, so a note is a copy of some hundred bytes, without a system call, and what was written
before a kill -9 stays. It does not survive a power failure. Each slot of `SLOT_BYTES` holds one request:

    0   length of the row, 0 where the slot is free
    4   output tokens of its stream that came
    8   the row of the ledger as msgpack, with the model whose limits hold for the request (it may use another one)

The next gateway that starts with this file books what it finds: rows that were whole as they are, and requests that
were running by what their replica says (`quire_gateway.booking`). Where it says nothing, they are booked by the
prompt's estimate and the text that came, as `UNSETTLED`.

The file is allocated before it is mapped: a full disk refuses room, and does not kill the process that writes. One slot
stays free for the row that replaces another, so that a request that has begun can always be noted as ended.

A kill between two notes loses nothing: a number is written by one copy of four bytes, since `struct` zeroes them first;
and a row that replaces another takes a slot of its own before the old one becomes free.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import deque
from dataclasses import astuple, replace
from pathlib import Path
from struct import Struct

import msgspec

from quire.private import private_fd, tighten
from quire_gateway.ledger_row import UNSETTLED, Row

SLOT_BYTES = 512
FIRST_SLOTS = 1024
MAX_SLOTS = 1 << 18
_MAX_FILES = 64  # gateways that share a folder
_HEAD = Struct("<II")
_NUMBER_BYTES = 4
_ROW_BYTES = SLOT_BYTES - _HEAD.size
# A row that would be too large keeps this much of the names of its model, backend and endpoint, and twice as much of
# its tenant and key.
_NAME_BYTES = 40
_encode = msgspec.msgpack.Encoder().encode


class Journal:
    """Slots of one file, which this process alone has open. Belongs to one event loop, except for `free`."""

    def __init__(self, path: Path) -> None:
        """Take the first of ``path``.0, ``path``.1 … that no running gateway has; ``inherited`` has what it held."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path, self._file = _first_unlocked(path)
        size = max(os.fstat(self._file).st_size, FIRST_SLOTS * SLOT_BYTES) // SLOT_BYTES * SLOT_BYTES
        try:
            os.posix_fallocate(self._file, 0, size)
            self.mapped = mmap.mmap(self._file, size)
        except OSError:
            os.close(self._file)
            raise
        self.free_slots: deque[int] = deque()
        rows: dict[str, tuple[int, Row, str]] = {}
        for slot in range(size // SLOT_BYTES):
            read = self._read(slot)
            if read is None:
                self.free(slot)
                continue
            row = read[0]
            if (other := rows.get(row.request_id)) is not None:  # the owner was killed between the two
                self.free(slot if row.outcome == UNSETTLED else other[0])
            if other is None or row.outcome != UNSETTLED:
                rows[row.request_id] = (slot, *read)
        self.inherited = list(rows.values())

    def has_room(self) -> bool:
        """Whether one more request can be noted, and the row of one that ends still find a free slot."""
        return len(self.free_slots) > 1 or self._grow()

    def put(self, slot: int | None, row: Row, limited: str = "") -> int | None:
        """Write a row into a free slot, in place of ``slot``, and return its slot; None for a new row without room.

        ``limited``: the model whose limits hold for the request. Long names are cut where the row would be too large.
        """
        data = _encode((*astuple(row), limited))
        if len(data) > _ROW_BYTES:
            data = _encode((*astuple(_cut_names(row)), _cut(limited, _NAME_BYTES)))
        if slot is None and not self.has_room():
            return None
        if not self.free_slots:
            return slot
        taken = self.free_slots.popleft()
        start = taken * SLOT_BYTES
        self.mapped[start + _NUMBER_BYTES : start + _HEAD.size + len(data)] = bytes(_NUMBER_BYTES) + data
        self._write_number(start, len(data))  # from now on it counts
        if slot is not None:
            self.free(slot)
        return taken

    def count(self, slot: int, num_tokens: int) -> None:
        """``num_tokens`` of the request's stream have come."""
        self._write_number(slot * SLOT_BYTES + _NUMBER_BYTES, num_tokens)

    def free(self, slot: int) -> None:
        """The row is in the ledger. May be called from any thread."""
        self._write_number(slot * SLOT_BYTES, 0)
        self.free_slots.append(slot)

    def close(self) -> None:
        """Remove the file if it holds nothing."""
        if len(self.free_slots) == len(self.mapped) // SLOT_BYTES:
            self.path.unlink(missing_ok=True)
        self.mapped.close()
        os.close(self._file)

    def _write_number(self, start: int, number: int) -> None:
        self.mapped[start : start + _NUMBER_BYTES] = number.to_bytes(_NUMBER_BYTES, "little")

    def _grow(self) -> bool:
        """Double the file, or make it larger by `FIRST_SLOTS` where the disk has no room for that."""
        first = len(self.mapped) // SLOT_BYTES
        for more in (first, FIRST_SLOTS):
            if first + more > MAX_SLOTS:
                continue
            try:
                os.posix_fallocate(self._file, 0, (first + more) * SLOT_BYTES)
                self.mapped.resize((first + more) * SLOT_BYTES)
            except OSError:
                os.ftruncate(self._file, first * SLOT_BYTES)  # a part of it may have been allocated
                continue
            self.free_slots.extend(range(first, first + more))
            return True
        return False

    def _read(self, slot: int) -> tuple[Row, str] | None:
        start = slot * SLOT_BYTES
        length, num_tokens = _HEAD.unpack_from(self.mapped, start)
        if not 0 < length <= _ROW_BYTES:
            return None
        try:
            values = msgspec.msgpack.decode(self.mapped[start + _HEAD.size : start + _HEAD.size + length])
            row, limited = Row(*values[:-1]), values[-1]
        except (msgspec.DecodeError, TypeError, IndexError):
            return None
        return replace(row, output_tokens=num_tokens) if row.outcome == UNSETTLED else row, limited


def _cut_names(row: Row) -> Row:
    return replace(
        row,
        model=_cut(row.model, _NAME_BYTES),
        backend=_cut(row.backend, _NAME_BYTES),
        endpoint=_cut(row.endpoint, _NAME_BYTES),
        tenant=_cut(row.tenant, 2 * _NAME_BYTES),
        key=_cut(row.key, 2 * _NAME_BYTES),
    )


def _cut(text: str, max_bytes: int) -> str:
    return text.encode("utf-8", "replace")[:max_bytes].decode("utf-8", "ignore")


def _first_unlocked(path: Path) -> tuple[Path, int]:
    for number in range(_MAX_FILES):
        candidate = path.with_name(f"{path.name}.{number}")
        tighten(candidate)
        file = private_fd(candidate, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            continue
        if (
            candidate.exists() and os.fstat(file).st_ino == candidate.stat().st_ino
        ):  # or its owner has just removed it
            return candidate, file
        os.close(file)
    raise OSError(f"{_MAX_FILES} gateways have their journals beside {path}; give this one another folder")
