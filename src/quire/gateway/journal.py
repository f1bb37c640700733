"""`Journal`: the requests of this gateway that the ledger has no row of yet, in a file that outlives the process.

The file is mapped into memory, so a note is a copy of some hundred bytes, without a system call, and what was written
before a kill -9 stays. It does not survive a power failure. Each slot of `SLOT_BYTES` holds one request:

    0   length of the row, 0 where the slot is free
    4   output tokens of its stream that came
    8   the row of the ledger as msgpack, with the model whose limits hold for the request (it may use another one)

The next gateway that starts with this file books what it finds: rows that were whole as they are, and requests that
were running by what their replica says (`quire.gateway.booking`). Where it says nothing, they are booked by the
prompt's estimate and the text that came, as `UNSETTLED`.

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

from quire.gateway.ledger_row import UNSETTLED, Row

SLOT_BYTES = 512
FIRST_SLOTS = 1024
MAX_SLOTS = 1 << 18
_MAX_FILES = 64  # gateways that share a folder
_HEAD = Struct("<II")
_NUMBER_BYTES = 4
_encode = msgspec.msgpack.Encoder().encode


class Journal:
    """Slots of one file, which this process alone has open. Belongs to one event loop, except for `free`."""

    def __init__(self, path: Path) -> None:
        """Take the first of ``path``.0, ``path``.1 … that no running gateway has; ``found`` has what it held."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._file = _first_unlocked(path)
        size = max(os.fstat(self._file).st_size, FIRST_SLOTS * SLOT_BYTES) // SLOT_BYTES * SLOT_BYTES
        os.ftruncate(self._file, size)
        self._map = mmap.mmap(self._file, size)
        self._free: deque[int] = deque()
        found: dict[str, tuple[int, Row, str]] = {}
        for slot in range(size // SLOT_BYTES):
            read = self._read(slot)
            if read is None:
                self.free(slot)
                continue
            row = read[0]
            if (other := found.get(row.request_id)) is not None:  # the owner was killed between the two
                self.free(slot if row.outcome == UNSETTLED else other[0])
            if other is None or row.outcome != UNSETTLED:
                found[row.request_id] = (slot, *read)
        self.found = list(found.values())

    def put(self, slot: int | None, row: Row, limited: str = "") -> int | None:
        """Write a row into a free slot, in place of ``slot``, and return its slot: ``slot`` where the row is too large.

        ``limited``: the model whose limits hold for the request.
        """
        data = _encode((*astuple(row), limited))
        if len(data) > SLOT_BYTES - _HEAD.size or not (self._free or self._grow()):
            return slot
        taken = self._free.popleft()
        start = taken * SLOT_BYTES
        self._map[start + _NUMBER_BYTES : start + _HEAD.size + len(data)] = bytes(_NUMBER_BYTES) + data
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
        self._free.append(slot)

    def close(self) -> None:
        """Remove the file if it holds nothing."""
        if len(self._free) == len(self._map) // SLOT_BYTES:
            self.path.unlink(missing_ok=True)
        self._map.close()
        os.close(self._file)

    def _write_number(self, start: int, number: int) -> None:
        self._map[start : start + _NUMBER_BYTES] = number.to_bytes(_NUMBER_BYTES, "little")

    def _grow(self) -> bool:
        first = len(self._map) // SLOT_BYTES
        if first >= MAX_SLOTS:
            return False
        self._map.resize(2 * first * SLOT_BYTES)
        self._free.extend(range(first, 2 * first))
        return True

    def _read(self, slot: int) -> tuple[Row, str] | None:
        start = slot * SLOT_BYTES
        length, num_tokens = _HEAD.unpack_from(self._map, start)
        if not 0 < length <= SLOT_BYTES - _HEAD.size:
            return None
        try:
            values = msgspec.msgpack.decode(self._map[start + _HEAD.size : start + _HEAD.size + length])
            row, limited = Row(*values[:-1]), values[-1]
        except (msgspec.DecodeError, TypeError, IndexError):
            return None
        return replace(row, output_tokens=num_tokens) if row.outcome == UNSETTLED else row, limited


def _first_unlocked(path: Path) -> tuple[Path, int]:
    for number in range(_MAX_FILES):
        each = path.with_name(f"{path.name}.{number}")
        file = os.open(each, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            continue
        if each.exists() and os.fstat(file).st_ino == each.stat().st_ino:  # or its owner has just removed it
            return each, file
        os.close(file)
    raise OSError(f"{_MAX_FILES} gateways have their journals beside {path}; give this one another folder")
