"""`Journal`: requests and output ids of streams on disk, so that a client whose connection broke gets the rest.

The files are those of `quire.api.journal_file`, each of a stream that runs or has ended less than `KEPT_S` ago.
A line is in the file before its events go to the client, so that whatever a client has seen is there, however the
process ends. One thread writes, all that waits at once. Nothing is synced: a crash of the machine loses the journal.
A stream in the making is locked, so two servers may share a folder. Where the disk or the folder's share of it is full,
streams go on without a journal, and the log says so once.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from quire.api.journal_file import End, Head, StreamFile, WritingThread, encode
from quire.api.relayed import Delivered, Relayed
from quire.errors import ConfigError, NotFoundError, RequestError, clip
from quire.http.call import AnswerName
from quire.http.refusals import HttpError, Refusal
from quire.metrics.log import Log
from quire.private import private_folder

KEPT_S = 60.0  # after the end of a stream, or the start of a server
SWEEP_S = 2.0
_ID = re.compile(r"[a-z]+[-_][0-9a-f]{32}")
log = Log("journal")


class Entry:
    """A stream of this server and its file. ``num_seen``: events that the client has from before."""

    def __init__(self, journal: Journal, folder: Path, stream_id: str, num_seen: int = 0) -> None:
        self.stream_id = stream_id
        self.file = StreamFile(folder / f"{stream_id}.journal")
        self.tenant: str | None = None  # None: not known yet
        self.num_events = 0
        self.num_bytes = 0
        self.is_cut = False  # the file is not the whole stream
        self.is_left = False  # written by a server that has ended, or will
        self.ended_s: float | None = None  # when it was closed
        self.end: End | None = None
        self.head: Head | None = None  # set for a stream that is resumed, like the next two
        self.body = b""
        self.delivered: Sequence[Delivered] = ()
        self.end_request: Callable[[], Awaitable[None]] | None = None  # ends the request that writes it
        self.released = asyncio.Event()
        self._journal = journal
        self._num_seen = num_seen
        self._name = stream_id.encode()

    def relayed(self, unix_time: float) -> Relayed:
        """Return what resumes the stream."""
        assert self.head is not None
        elapsed_s = max(0.0, unix_time - self.head.arrived_unix)
        answer = AnswerName.read(self.head.answer)
        return Relayed(answer, self.delivered, self.head.fingerprint, elapsed_s, by_gateway=False)

    def numbered(self, events: bytes) -> bytes:
        """Return the events that the client has not seen, each with its id."""
        if not events:
            return b""
        frames = []
        for event in events.split(b"\n\n")[:-1]:
            self.num_events += 1
            if self.num_events > self._num_seen:
                frames.append(b"id: %b:%d\n%b\n\n" % (self._name, self.num_events, event))
        return b"".join(frames)

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
            await self._journal.append(self, encode(self.end) + b"\n")
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
        self._thread = WritingThread()
        try:
            private_folder(folder, is_ours=False, files="*.journal")
            self._look()
        except OSError as error:
            raise ConfigError(f"--journal {folder} cannot be used: {error}.", param="journal") from None

    async def begin(self, stream_id: str, head: Head, body: Sequence[bytes]) -> Entry | None:
        """Begin a stream; None where there is no room for it."""
        entry = Entry(self, self._folder, stream_id)
        entry.tenant = head.tenant
        self._entries[stream_id] = entry
        await self.append(entry, b"".join([encode(head), b"\n", *body, b"\n"]))
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
        await self._do(entry, lambda: entry.file.write(line))
        if self._is_full and not entry.is_cut:
            self._is_full = False
            log.info("journal_goes_on")

    async def resume(self, tenant: str, stream_id: str, num_seen: int) -> Entry:
        """Return a tenant's stream as its file has it, to go on behind event ``num_seen``. What writes it ends.

        Another tenant's id is answered before anything is touched, and as one that does not exist.

        Raises:
            NotFoundError: there is none of this id and tenant, or not any more.
            RequestError: it has less than ``num_seen`` events.
            HttpError: the disk was full (507), or another server has it (409).
        """
        if await self._tenant(stream_id) != tenant:
            raise _not_found(stream_id)
        before = self._entries.get(stream_id)
        if before is not None and before.end_request is not None:
            await before.end_request()
            await before.released.wait()
        if before is not None and before.is_cut:
            text = f"The stream {clip(stream_id)} cannot be resumed: the server's disk was full, and a part is missing."
            raise HttpError(Refusal(507, text, code="journal_full"))
        entry = Entry(self, self._folder, stream_id, num_seen)
        entry.tenant = tenant
        if await self._read(entry):
            text = f"The stream {clip(stream_id)} goes to another connection, or runs in an older server: try again."
            raise HttpError(Refusal(409, text, code="stream_runs"))
        if entry.head is None:
            await self._do(entry, entry.file.close)
            raise _not_found(stream_id)
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
        """Close a stream that has ended, or whose client has left. A second call has no effect."""
        entry.end_request = None
        if entry.released.is_set():
            return
        entry.body, entry.delivered = b"", ()
        if entry.head is None and not entry.num_events:  # its client has nothing of it
            self.discard(entry)
            entry.released.set()
            return
        if self._entries.get(entry.stream_id) is entry:
            entry.ended_s = self._now()
            self._entries[entry.stream_id] = self._entries.pop(entry.stream_id)
        await self._do(entry, entry.file.close)
        entry.released.set()

    def discard(self, entry: Entry) -> None:
        """Delete a stream."""
        if self._entries.get(entry.stream_id) is entry:
            del self._entries[entry.stream_id]
        self._num_bytes -= entry.num_bytes
        entry.num_bytes = 0
        self._thread.put(entry.file.delete)

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
        await self._thread.close()

    async def _tenant(self, stream_id: str) -> str | None:
        """Return whose stream it is; None: there is none of this id."""
        known = self._entries.get(stream_id)
        if known is not None and known.tenant is not None:
            return known.tenant
        if not _ID.fullmatch(stream_id):
            return None
        tenants: list[str | None] = []

        def look() -> None:
            with suppress(OSError):
                tenants.append(StreamFile(self._folder / f"{stream_id}.journal").tenant())

        await self._thread.put(look).wait()
        return tenants[0] if tenants else None

    async def _read(self, entry: Entry) -> bool:
        """Fill an entry from its file; return whether another server writes that."""
        is_locked = False

        def read() -> None:
            nonlocal is_locked
            try:
                content = entry.file.read()
            except BlockingIOError:
                is_locked = True
            except FileNotFoundError:
                return
            else:
                if content is not None:
                    entry.head, entry.body, entry.delivered, entry.num_events, entry.end = content

        await self._do(entry, read)
        return is_locked

    def _look(self) -> None:
        """Find the files of other servers, such as one that died."""
        for item in os.scandir(self._folder):
            stream_id, dot, suffix = item.name.partition(".")
            if dot + suffix == ".journal" and stream_id not in self._entries and _ID.fullmatch(stream_id):
                entry = self._entries[stream_id] = Entry(self, self._folder, stream_id)
                entry.ended_s, entry.num_bytes, entry.is_left = self._now(), item.stat().st_size, True
                self._num_bytes += entry.num_bytes

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
        self._thread.put(entry.file.delete)

    async def _do(self, entry: Entry, work: Callable[[], None]) -> None:
        """Have the thread do something; a failure cuts the stream."""
        failure: list[OSError] = []

        def guarded() -> None:
            try:
                work()
            except OSError as error:
                failure.append(error)

        await self._thread.put(guarded).wait()
        if failure and not entry.is_cut:
            self._cut(entry, str(failure[0]))


def _not_found(stream_id: str) -> NotFoundError:
    text = (
        f"There is no stream {clip(stream_id)} here: one can be resumed until {KEPT_S:.0f} s after its end."
    )
    return NotFoundError(text, code="stream_not_found")


def parse_event_id(event_id: bytes, stream_id: str | None = None) -> tuple[str, int]:
    """Return the stream's id and the number of events seen, from ``ID:NUMBER``, or NUMBER where ``stream_id`` is known.

    Raises:
        RequestError: it is neither, or of another stream.
    """
    name, colon, number = event_id.decode("latin-1").strip().rpartition(":")
    if number.isascii() and number.isdigit() and len(number) < 16:
        if colon and stream_id in (None, name):
            return name, int(number)
        if not colon and stream_id is not None:
            return stream_id, int(number)
    raise RequestError(
        f"Last-Event-ID = {clip(event_id.decode('latin-1'))} is not allowed: it must be the id of the last event that "
        "was received, such as 'chatcmpl-0f…:17'.",
        code="invalid_event_id",
    )
