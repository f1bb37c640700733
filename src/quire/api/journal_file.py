"""The files of `quire.api.journal`, and the thread that works on them.

FOLDER/ID.journal, for this user alone, is a stream:

    {"path": …, "tenant": …, "answer": …, "num_bytes": …}   how the request came, and the length of its body
    BODY                                                    as it came
    [7,[0,[812],16,null,null,null]]                         number of events so far, and a `Delivered`: a line per chunk
    {"status": 0, "num_events": 9, "events": ""}            the end; the events of one that is an error

A file that is open is locked.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from quire.api.relayed import Delivered
from quire.durable import complete_lines
from quire.metrics.log import Log

encode = msgspec.json.Encoder().encode
_chunk = msgspec.json.Decoder(tuple[int, Delivered]).decode
log = Log("journal")


class Head(msgspec.Struct):
    """The first line of a file."""

    path: str
    tenant: str
    answer: str  # id, time and seed
    fingerprint: str  # digest of all that the output depends on
    arrived_unix: float
    num_bytes: int  # bytes of the body


class End(msgspec.Struct):
    """The last line of the file of a stream that has ended."""

    status: int  # HTTP status of the error, or 0
    num_events: int  # events of the whole stream
    events: str = ""  # events of the error


class StreamFile:
    """One file. Its methods block, and belong to the thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def write(self, data: bytes) -> None:
        """Append, to a new file at first."""
        if self._fd < 0:
            self._open(os.O_CREAT | os.O_TRUNC)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def delete(self) -> None:
        """Delete the file, unless another server has it open."""
        try:
            if self._fd < 0:
                self._open(0)
            self._path.unlink()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EWOULDBLOCK):
                log.error("journal_not_deleted", path=str(self._path), error=str(error))
        self.close()

    def tenant(self) -> str | None:
        """Return whose stream it is, whether another server writes it or not; None where there is no whole head.

        Raises:
            OSError: the file cannot be read.
        """
        with self._path.open("rb") as file:
            try:
                return msgspec.json.decode(file.readline(), type=Head).tenant
            except msgspec.DecodeError:
                return None

    def read(self) -> tuple[Head, bytes, list[Delivered], int, End | None] | None:
        """Open the file; return head, body, chunks, number of events and end. An incomplete last line is removed.

        None: the file has no whole head.

        Raises:
            FileNotFoundError: there is none.
            BlockingIOError: another server has it open.
        """
        self._open(0)
        raw = self._path.read_bytes()
        try:
            first, _, rest = raw.partition(b"\n")
            head = msgspec.json.decode(first, type=Head)
            body, end_bytes = rest[: head.num_bytes], rest[head.num_bytes + 1 :]
            delivered: list[Delivered] = []
            num_events, end = 0, None
            for line in complete_lines(self._fd, end_bytes):
                if line[:1] == b"[":
                    num_events, chunk = _chunk(line)
                    delivered.append(chunk)
                else:
                    end = msgspec.json.decode(line, type=End)
                    num_events = end.num_events
        except msgspec.DecodeError as error:
            log.error("journal_unreadable", path=str(self._path), error=str(error))
            return None
        return (head, body, delivered, num_events, end) if len(body) == head.num_bytes else None

    def _open(self, flags: int) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise


class WritingThread:
    """A thread that does what waits at once, in order. The methods are for the event loop's thread."""

    def __init__(self) -> None:
        self._pending: list[Callable[[], None]] = []
        self._done = asyncio.Event()  # set when what is pending has been done
        self._is_working = False
        self._thread = ThreadPoolExecutor(1, "quire-journal")

    def put(self, work: Callable[[], None]) -> asyncio.Event:
        """Have the thread do something; the event is set when it is done."""
        self._pending.append(work)
        if not self._is_working:
            self._is_working = True
            self._task = asyncio.get_running_loop().create_task(self._run())
        return self._done

    async def close(self) -> None:
        """Do what is pending, and end the thread."""
        while self._is_working:
            await self._done.wait()
        self._thread.shutdown()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._pending:
            works, self._pending = self._pending, []
            done, self._done = self._done, asyncio.Event()
            await loop.run_in_executor(self._thread, _do_all, works)
            done.set()
        self._is_working = False


def _do_all(works: Sequence[Callable[[], None]]) -> None:
    for work in works:
        work()
