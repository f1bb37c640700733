"""A process that answers probes whatever the server's load is, and hands every other connection to the server.

Run as ``python -I front.py LISTEN CONTROL STATE``, three inherited file descriptors:

    LISTEN    the server's listening socket
    CONTROL   a unix socket to the server: connections go over it, and its end is the end of this process. A byte from
              the server asks this process to accept no more, to hand over all that it has, and to end
    STATE     shared memory that the server writes (`quire.http.front_link`): its clock and the answer to each probe

The first bytes of a connection are looked at without being read, so the server sees all of what it gets. Little is
imported: the process starts at once and is small.
"""

from __future__ import annotations

import mmap
import resource
import select
import signal
import socket
import struct
import sys
import time
from array import array

from setproctitle import setproctitle

from quire.recording_signal import pass_recording_signal_on

PATHS = (b"/livez", b"/readyz", b"/health", b"/startupz")
HEAD_BYTES = 16
# One per path: length and bytes of the answer, without its connection header.
SLOT = struct.Struct("<H1022s")
STATE_BYTES = HEAD_BYTES + len(PATHS) * SLOT.size
# A server whose loop has not run for so long is alive no more.
STALLED_S = 10.0
UNREADY_S = 4.0  # the same: requests had better go elsewhere
_STALLED = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: 20\r\n\r\n"
    b'{"status":"stalled"}'
)
_STARTS = tuple(b"GET " + path for path in PATHS)
_MAX_HEAD = 4096
_PATIENCE_S = 0.25  # for the first bytes; then the server waits for them
KEEP_ALIVE_S = 75  # in seconds, the server's too
_RETRY_S = 0.01
FDS_AT_ONCE = 64  # connections of one message, and accepted in one turn


def state_head(state: mmap.mmap) -> tuple[memoryview[int], memoryview[float]]:
    """Return a counter that is odd while the server writes, and its monotonic clock: each the only item of a view.

    An item is stored and loaded as one word. `struct` goes through the bytes, and zeroes them first.
    """
    head = memoryview(state)[:HEAD_BYTES]
    return head[:8].cast("Q"), head[8:].cast("d")


class Front:
    """The loop of the process. Connections are kept by file descriptor."""

    def __init__(self, listen: socket.socket, control: socket.socket, state: mmap.mmap) -> None:
        self._listen = listen
        self._control = control
        self.state = state
        self.counter, self.clock = state_head(state)
        self._epoll = select.epoll()
        self._waiting: dict[int, tuple[socket.socket, float]] = {}  # until this time
        self._leaving: list[socket.socket] = []  # to the server
        self._control_events = select.EPOLLIN
        self._retires = False
        listen.setblocking(False)
        control.setblocking(False)
        self._epoll.register(listen, select.EPOLLIN)
        self._epoll.register(control, select.EPOLLIN)

    def run(self) -> None:
        """Serve until the server ends."""
        next_sweep_s = 0.0
        while True:
            for fd, events in self._epoll.poll(_PATIENCE_S if self._waiting else -1):
                if fd == self._listen.fileno():
                    self._accept()
                elif fd == self._control.fileno():
                    if events & (select.EPOLLIN | select.EPOLLHUP) and not self._read_control():
                        return  # the server has ended
                elif fd in self._waiting:
                    self._look(self._waiting[fd][0])
            if time.monotonic() >= next_sweep_s:
                next_sweep_s = time.monotonic() + _PATIENCE_S
                self._sweep()
            self._hand_over()
            if self._retires and not self._leaving:
                return

    def _read_control(self) -> bool:
        """Read what the server asks for; return False at its end."""
        try:
            goes_on = bool(self._control.recv(1))
        except BlockingIOError:
            return True
        except OSError:
            return False
        if goes_on:
            self._retires = True
            self._epoll.unregister(self._listen)
            for sock, _ in list(self._waiting.values()):
                self._leave(sock)
        return goes_on

    def _accept(self) -> None:
        for _ in range(FDS_AT_ONCE):
            try:
                sock, _ = self._listen.accept()
            except BlockingIOError:
                return
            except OSError:  # too many open files: those that wait are handed over first
                time.sleep(_RETRY_S)
                return
            sock.setblocking(False)
            self._look(sock)

    def _look(self, sock: socket.socket) -> None:
        """Answer probes; leave anything else to the server; wait while it may become either."""
        while self._answered(sock):
            continue

    def _answered(self, sock: socket.socket) -> bool:
        """Whether there was a probe, and another one may follow."""
        try:
            seen = sock.recv(_MAX_HEAD, socket.MSG_PEEK)
        except BlockingIOError:
            self._wait(sock, _PATIENCE_S)
            return False
        except OSError:
            self._drop(sock)
            return False
        if not seen:
            self._drop(sock)
        elif not any(seen.startswith(start) or start.startswith(seen) for start in _STARTS):
            self._leave(sock)
        elif b"\r\n\r\n" not in seen:
            if len(seen) < _MAX_HEAD:
                self._wait(sock, _PATIENCE_S)
            else:
                self._leave(sock)
        else:
            return self._answer(sock, seen[: seen.index(b"\r\n\r\n") + 4])
        return False

    def _answer(self, sock: socket.socket, head: bytes) -> bool:
        line, _, fields = head.lower().partition(b"\r\n")
        answer = self.probe_answer(line)
        # A body or a page of another origin is the server's business.
        if answer is None or any(name in fields for name in (b"content-length", b"transfer-enc", b"origin:")):
            self._leave(sock)
            return False
        closes = b"connection: close" in fields or not line.endswith(b" http/1.1")
        try:
            sock.recv(len(head))
            sock.send(answer.replace(b"\r\n", b"\r\nconnection: close\r\n", 1) if closes else answer)
        except OSError:
            closes = True
        if closes:
            self._drop(sock)
        else:
            self._wait(sock, KEEP_ALIVE_S, again=True)
        return not closes

    def probe_answer(self, line: bytes) -> bytes | None:
        """Return the answer to a request line in lower case.

        None, which leaves it to the server: it is no probe, or there is no state yet, or the server is long in writing.
        """
        parts = line.split(b" ")
        if len(parts) != 3 or parts[1] not in PATHS:
            return None
        offset = HEAD_BYTES + PATHS.index(parts[1]) * SLOT.size
        for _ in range(1000):
            before = self.counter[0]
            length, answer = SLOT.unpack_from(self.state, offset)
            if before % 2 == 0 and self.counter[0] == before:
                break
        else:
            length, answer = 0, b""
        limit_s = UNREADY_S if parts[1] == b"/readyz" else STALLED_S
        if before > 0 and time.monotonic() - self.clock[0] >= limit_s:
            return _STALLED
        return answer[:length] if length else None

    def _wait(self, sock: socket.socket, patience_s: float, *, again: bool = False) -> None:
        fd = sock.fileno()
        if fd not in self._waiting:
            # Each new byte is looked at once: a level would report what was only peeked at for ever.
            self._epoll.register(fd, select.EPOLLIN | select.EPOLLET)
            self._waiting[fd] = (sock, time.monotonic() + patience_s)
        elif again:
            self._waiting[fd] = (sock, time.monotonic() + patience_s)

    def _forget(self, sock: socket.socket) -> None:
        if self._waiting.pop(sock.fileno(), None) is not None:
            self._epoll.unregister(sock.fileno())

    def _drop(self, sock: socket.socket) -> None:
        self._forget(sock)
        sock.close()

    def _leave(self, sock: socket.socket) -> None:
        self._forget(sock)
        self._leaving.append(sock)

    def _sweep(self) -> None:
        now_s = time.monotonic()
        for sock, until_s in list(self._waiting.values()):
            if now_s >= until_s:
                self._leave(sock)

    def _hand_over(self) -> None:
        """Send the connections that leave; the rest when the server has taken some."""
        while self._leaving:
            some = self._leaving[:FDS_AT_ONCE]
            fds = array("i", [sock.fileno() for sock in some])
            try:
                self._control.sendmsg([b"c"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            except BlockingIOError:
                break
            except OSError:
                # Too many connections are on their way, or the server has ended: the next poll tells.
                time.sleep(_RETRY_S)
                break
            del self._leaving[: len(some)]
            for sock in some:
                sock.close()
        wanted = select.EPOLLIN | (select.EPOLLOUT if self._leaving else 0)
        if wanted != self._control_events:
            self._control_events = wanted
            self._epoll.modify(self._control, wanted)


def main(listen: int, control: int, state: int) -> None:
    """Serve until the server ends. It also handles the signals that a terminal sends to all of its processes."""
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, signal.SIG_IGN)
    pass_recording_signal_on()
    setproctitle("quire: front")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    memory = mmap.mmap(state, STATE_BYTES, prot=mmap.PROT_READ)
    Front(socket.socket(fileno=listen), socket.socket(fileno=control), memory).run()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
