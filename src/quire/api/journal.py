"""`Journal`: requests and output ids of streams on disk, so that a client whose connection broke gets the rest.

FOLDER/ID.journal, for this user alone, is a stream that runs or has ended less than `KEPT_S` ago:

    {"path": …, "tenant": …, "answer": …, "num_bytes": …}   how the request came, and the length of its body
    BODY                                                    as it came
    [7,[0,[812],16,null,null,null]]                         number of events so far, and a `Delivered`: a line per chunk
    {"status": 0, "num_events": 9, "events": ""}            the end; the events of one that is an error

A line is in the file before its events go to the client, so that whatever a client has seen is there, however the
process ends. One thread writes, all that waits at once. Nothing is synced: a crash of the machine loses the journal.
A stream in the making is locked, so two servers may share a folder. Where the disk or the folder's share of it is full,
streams go on without a journal, and the log says so once.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec

from quire.api.relayed import Delivered, Relayed, answer_of
from quire.errors import ConfigError, NotFoundError, RequestError, clip
from quire.http.edge import TENANT
from quire.http.refusals import HttpError, Refusal
from quire.metrics.log import Log

KEPT_S = 60.0  # after the end of a stream, or the start of a server
SWEEP_S = 2.0
_ID = re.compile(r"[a-z]+[-_][0-9a-f]{32}")
_encode = msgspec.json.Encoder().encode
_chunk = msgspec.json.Decoder(tuple[int, Delivered]).decode
log = Log("journal")


class Head(msgspec.Struct):
    """The first line of a file."""

    path: str
    tenant: str
    answer: str  # id, time and seed
    fingerprint: str  # of all that the output depends on
    arrived_unix: float
    num_bytes: int  # of the body


class End(msgspec.Struct):
    """The last line of the file of a stream that has ended."""

    status: int  # of the error, or 0
    num_events: int  # of the whole stream
    events: str = ""  # of the error


class Entry:
    """A stream of this server and its file. ``num_seen``: events that the client has from before."""

    def __init__(self, journal: Journal, stream_id: str, num_seen: int = 0) -> None:
        self.stream_id = stream_id
        self.num_events = 0
        self.num_bytes = 0
        self.is_cut = False  # the file is not the whole stream
        self.is_left = False  # by a server that has ended, or will
        self.ended_s: float | None = None  # when the last one let go of it
        self.end: End | None = None
        self.head: Head | None = None  # of a stream that is resumed, as the next two
        self.body = b""
        self.delivered: Sequence[Delivered] = ()
        self.let_go: Callable[[], Awaitable[None]] | None = None  # ends the request that writes it
        self.released = asyncio.Event()
        self._journal = journal
        self._num_seen = num_seen
        self._name = stream_id.encode()
        self._fd = -1  # the writing thread's

    def relayed(self, unix_time: float) -> Relayed:
        """Return what resumes the stream."""
        assert self.head is not None
        elapsed_s = max(0.0, unix_time - self.head.arrived_unix)
        answer = answer_of(self.head.answer)
        return Relayed(*answer, self.delivered, self.head.fingerprint, elapsed_s, by_gateway=False)

    def numbered(self, events: bytes) -> bytes:
        """Return the events that the client has not seen, each with its id."""
        if not events:
            return b""
        found = []
        for event in events.split(b"\n\n")[:-1]:
            self.num_events += 1
            if self.num_events > self._num_seen:
                found.append(b"id: %b:%d\n%b\n\n" % (self._name, self.num_events, event))
        return b"".join(found)

    async def chunk(self, tag: bytes, events: bytes) -> bytes:
        """Write a chunk; return its events as `numbered`."""
        shown = self.numbered(events)
        await self._journal.append(self, b"[%d,%b]\n" % (self.num_events, tag))
        return shown

    async def finish(self, status: int, events: bytes) -> bytes:
        """Write the end, unless it is there; return its events as `numbered`."""
        shown = self.numbered(events)
        if self.end is None:
            self.end = End(status, self.num_events, events.decode() if status else "")
            await self._journal.append(self, _encode(self.end) + b"\n")
        return shown


class Journal:
    """The folder. All methods are for the event loop's thread."""

    def __init__(
        self, folder: Path, max_bytes: int, now: Callable[[], float], is_ready: Callable[[], bool]
    ) -> None:
        """``is_ready``: streams of an earlier server are kept until the model has been loaded for `KEPT_S`.

        Raises:
            ConfigError: the folder cannot be used.
        """
        self._folder = folder
        self._max_bytes = max_bytes
        self._now = now
        self._is_ready = is_ready
        self._entries: dict[str, Entry] = {}  # in order of their end, those that run anywhere
        self._num_bytes = 0
        self._is_full = False
        self._pending: list[Callable[[], None]] = []
        self._written = asyncio.Event()  # set when what is pending has been done
        self._is_writing = False
        self._thread = ThreadPoolExecutor(1, "quire-journal")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._look()
        except OSError as error:
            raise ConfigError(f"--journal {folder} cannot be used: {error}.", param="journal") from None

    async def begin(self, stream_id: str, head: Head, body: Sequence[bytes]) -> Entry | None:
        """Begin a stream; None where there is no room for it."""
        entry = Entry(self, stream_id)
        self._entries[stream_id] = entry
        await self.append(entry, b"".join([_encode(head), b"\n", *body, b"\n"]))
        if entry.is_cut:
            self.discard(entry)
            return None
        return entry

    async def append(self, entry: Entry, line: bytes) -> None:
        """Write to the file of a stream; what fails cuts it."""
        if entry.is_cut:
            return
        if not self._make_room(len(line)):
            self._cut(entry, "the journal has no room left (--journal-mib)")
            return
        entry.num_bytes += len(line)
        self._num_bytes += len(line)
        await self._do(entry, lambda: _write(entry, self._path(entry.stream_id), line))
        if self._is_full and not entry.is_cut:
            self._is_full = False
            log.info("journal_goes_on")

    async def resume(self, stream_id: str, num_seen: int) -> Entry:
        """Return the stream as its file has it, to go on behind event ``num_seen``. A request that writes it ends.

        Raises:
            NotFoundError: there is none of this id and tenant, or not any more.
            RequestError: it has less than ``num_seen`` events.
            HttpError: the disk was full (507), or another server has it (409).
        """
        before = self._entries.get(stream_id)
        if before is not None and before.let_go is not None:
            await before.let_go()
            await before.released.wait()
        if before is not None and before.is_cut:
            text = f"The stream {clip(stream_id)} cannot be resumed: the server's disk was full, and a part is missing."
            raise HttpError(Refusal(507, text, code="journal_full"))
        entry = Entry(self, stream_id, num_seen)
        failure: list[OSError | None] = [None]

        def read() -> None:
            try:
                _read(entry, self._path(stream_id))
            except OSError as error:
                failure[0] = error

        if _ID.fullmatch(stream_id):
            await self._do(entry, read)
        error = failure[0]
        if isinstance(error, BlockingIOError):
            text = f"The stream {clip(stream_id)} still runs in the server that this one replaces: try again."
            raise HttpError(Refusal(409, text, code="stream_runs"))
        if entry.head is None or entry.head.tenant != TENANT.get():
            await self._do(entry, lambda: _close(entry))
            text = f"There is no stream {clip(stream_id)} here: one can be resumed until {KEPT_S:.0f} s after its end."
            raise NotFoundError(text, code="stream_not_found")
        entry.num_bytes = before.num_bytes if before is not None else 0
        self._entries[stream_id] = entry
        if num_seen > entry.num_events:
            await self.release(entry)
            text = (
                f"Last-Event-ID = {num_seen} is not allowed: the stream has {entry.num_events} events so far."
            )
            raise RequestError(text, code="invalid_event_id")
        entry.num_events = 0  # counted again, while they are made again
        return entry

    async def release(self, entry: Entry) -> None:
        """Let go of a stream: it has ended, or its client has left."""
        entry.let_go = None
        if entry.released.is_set():
            return
        if entry.head is None and not entry.num_events:  # its client has nothing of it
            self.discard(entry)
            entry.released.set()
            return
        if self._entries.get(entry.stream_id) is entry:
            entry.ended_s = self._now()
            self._entries[entry.stream_id] = self._entries.pop(entry.stream_id)
        await self._do(entry, lambda: _close(entry))
        entry.released.set()

    def discard(self, entry: Entry) -> None:
        """Delete a stream."""
        if self._entries.get(entry.stream_id) is entry:
            del self._entries[entry.stream_id]
        self._num_bytes -= entry.num_bytes
        entry.num_bytes = 0
        self._put(lambda: _delete(entry, self._path(entry.stream_id)))

    async def run(self) -> None:
        """Delete what has expired, until this call is cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep()

    def sweep(self) -> None:
        """Delete what has expired."""
        with suppress(OSError):
            self._look()
        now_s, is_ready = self._now(), self._is_ready()
        for entry in list(self._entries.values()):
            if entry.ended_s is None:
                continue
            if entry.is_left and not is_ready:
                entry.ended_s = now_s  # it could not be resumed yet
            elif now_s - entry.ended_s >= KEPT_S:
                self.discard(entry)

    async def close(self) -> None:
        """Write what is pending, and end the thread."""
        while self._is_writing:
            await self._written.wait()
        self._thread.shutdown()

    def _look(self) -> None:
        """Find the files of other servers, such as one that died."""
        for found in os.scandir(self._folder):
            stream_id, dot, suffix = found.name.partition(".")
            if dot + suffix == ".journal" and stream_id not in self._entries and _ID.fullmatch(stream_id):
                entry = self._entries[stream_id] = Entry(self, stream_id)
                entry.ended_s, entry.num_bytes, entry.is_left = self._now(), found.stat().st_size, True
                self._num_bytes += entry.num_bytes

    def _path(self, stream_id: str) -> Path:
        return self._folder / f"{stream_id}.journal"

    def _make_room(self, num_bytes: int) -> bool:
        """Delete streams that have ended, the oldest first, until there is room."""
        for entry in list(self._entries.values()) if self._num_bytes + num_bytes > self._max_bytes else ():
            if self._num_bytes + num_bytes <= self._max_bytes:
                break
            if entry.ended_s is not None:
                self.discard(entry)
        return self._num_bytes + num_bytes <= self._max_bytes

    def _cut(self, entry: Entry, reason: str) -> None:
        entry.is_cut = True
        if not self._is_full:
            self._is_full = True
            log.warning("journal_full", error=reason)
        self._num_bytes -= entry.num_bytes
        entry.num_bytes = 0
        self._put(lambda: _delete(entry, self._path(entry.stream_id)))

    async def _do(self, entry: Entry, work: Callable[[], None]) -> None:
        """Have the thread do something; a failure cuts the stream."""
        failure: list[OSError] = []

        def guarded() -> None:
            try:
                work()
            except OSError as error:
                failure.append(error)

        await self._put(guarded).wait()
        if failure and not entry.is_cut:
            self._cut(entry, str(failure[0]))

    def _put(self, work: Callable[[], None]) -> asyncio.Event:
        """Have the thread do something; the event is set when it is done."""
        self._pending.append(work)
        if not self._is_writing:
            self._is_writing = True
            self._writer = asyncio.get_running_loop().create_task(self._work())
        return self._written

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._pending:
            works, self._pending = self._pending, []
            written, self._written = self._written, asyncio.Event()
            await loop.run_in_executor(self._thread, _do_all, works)
            written.set()
        self._is_writing = False


def event_of(given: bytes, stream_id: str | None = None) -> tuple[str, int]:
    """Return the stream's id and the number of events seen, from ``ID:NUMBER``, or NUMBER where ``stream_id`` is known.

    Raises:
        RequestError: it is neither, or of another stream.
    """
    name, colon, number = given.decode("latin-1").strip().rpartition(":")
    if number.isascii() and number.isdigit() and len(number) < 16:
        if colon and stream_id in (None, name):
            return name, int(number)
        if not colon and stream_id is not None:
            return stream_id, int(number)
    raise RequestError(
        f"Last-Event-ID = {clip(given.decode('latin-1'))} is not allowed: it must be the id of the last event that was "
        "received, such as 'chatcmpl-0f…:17'.",
        code="invalid_event_id",
    )


def _do_all(works: Sequence[Callable[[], None]]) -> None:
    for work in works:
        work()


def _write(entry: Entry, path: Path, data: bytes) -> None:
    if entry._fd < 0:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        entry._fd = os.open(path, flags, 0o600)
        fcntl.flock(entry._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(entry._fd, rest) :]


def _close(entry: Entry) -> None:
    if entry._fd >= 0:
        os.close(entry._fd)
        entry._fd = -1


def _delete(entry: Entry, path: Path) -> None:
    """Delete the file of a stream, unless another server writes it."""
    try:
        fd = entry._fd if entry._fd >= 0 else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        entry._fd = fd
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EWOULDBLOCK):
            log.error("journal_not_deleted", path=str(path), error=str(error))
    _close(entry)


def _read(entry: Entry, path: Path) -> None:
    """Open and lock the file of a stream and read it; an incomplete last line is removed."""
    entry._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    try:
        fcntl.flock(entry._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        raw = path.read_bytes()
        first, _, rest = raw.partition(b"\n")
        head = msgspec.json.decode(first, type=Head)
        entry.body, lines = rest[: head.num_bytes], rest[head.num_bytes + 1 :]
        whole = lines[: lines.rfind(b"\n") + 1]
        if len(whole) < len(lines):
            os.ftruncate(entry._fd, len(raw) - len(lines) + len(whole))
        delivered: list[Delivered] = []
        for line in whole.splitlines():
            if line[:1] == b"[":
                entry.num_events, chunk = _chunk(line)
                delivered.append(chunk)
            else:
                entry.end = msgspec.json.decode(line, type=End)
                entry.num_events = entry.end.num_events
        entry.delivered = delivered
        if len(entry.body) == head.num_bytes:
            entry.head = head
    except BlockingIOError:
        _close(entry)
        raise
    except msgspec.DecodeError as error:  # it has no whole head
        log.error("journal_unreadable", path=str(path), error=str(error))
