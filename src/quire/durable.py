"""What outlives the process: a folder of `Records`, and lines at the end of a file. Both are JSON, for this user alone.

A record is replaced as a whole. A line that a crash cut in two is removed when its file is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from quire.metrics.log import Log
from quire.private import private_folder, written_anew

T = TypeVar("T")
log = Log("files")


class Records(Generic[T]):
    """Values of one type in a folder, each in a file ID.json. Nothing is cached."""

    def __init__(self, folder: Path, kind: type[T], ids: re.Pattern[str]) -> None:
        """``ids``: what an id looks like; any other file in the folder is left alone.

        Raises:
            OSError: the folder cannot be used.
        """
        private_folder(folder, files="*")
        self._folder = folder
        self._kind = kind
        self._ids = ids

    def put(self, record_id: str, value: T) -> None:
        """Write or replace a record. Raises `OSError`, and then the old one stays."""
        write_json(self._path(record_id), value)

    def get(self, record_id: str) -> T | None:
        """Return a record; None if there is none, or none that can be read, which the log names."""
        if self._ids.fullmatch(record_id) is None:
            return None
        path = self._path(record_id)
        try:
            return msgspec.json.decode(path.read_bytes(), type=self._kind)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            log.error("record_unreadable", path=str(path), error=str(error))
            return None

    def all(self) -> Iterator[tuple[str, T]]:
        """Yield each id and record, the one that was written first at first."""
        times: list[tuple[int, str]] = []
        for path in self._folder.glob("*.json"):
            with suppress(FileNotFoundError):  # another server may delete it now
                times.append((path.stat().st_mtime_ns, path.stem))
        for _, record_id in sorted(times):
            if (value := self.get(record_id)) is not None:
                yield record_id, value

    def delete(self, record_id: str) -> None:
        """Delete a record, if it is there."""
        self._path(record_id).unlink(missing_ok=True)

    def _path(self, record_id: str) -> Path:
        return self._folder / f"{record_id}.json"


def write_json(path: Path, value: Any) -> None:
    """Replace the contents of ``path`` with ``value`` atomically, also if the power fails."""
    made = path.with_suffix(".tmp")
    with removed_on_failure(made):
        with written_anew(made) as file:
            file.write(msgspec.json.encode(value))
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, path)


@contextmanager
def removed_on_failure(*paths: Path) -> Iterator[None]:
    """Leave no half of a file behind where the block fails."""
    try:
        yield
    except BaseException:
        for path in paths:
            path.unlink(missing_ok=True)
        raise


def complete_lines(fd: int, end: bytes) -> list[bytes]:
    """Return the lines in ``end``, the last bytes of an open file. An incomplete last one is cut off the file."""
    num_bytes = end.rfind(b"\n") + 1
    if num_bytes < len(end):
        os.ftruncate(fd, os.fstat(fd).st_size - (len(end) - num_bytes))
    return end[:num_bytes].splitlines()
