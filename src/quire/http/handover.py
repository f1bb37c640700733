"""Handing the listening sockets of a server over to a new one (`quire.http.takeover`), with no connection refused.

    new                                     old, which serves
    connects to ADDRESS.sock  ────────────> checks that the user is the same
    <─────────────────────────────────────  hello: its process, its memory, its listening sockets
    loads the model; if it cannot, it ends, and the old server has lost nothing
    take  ────────────────────────────────> accepts no more, stops its jobs; connections wait in the kernel's queue
    <─────────────────────────────────────  yours: what it keeps in memory for clients
    accepts
    serving  ─────────────────────────────> sends each connection that is between two requests, until it has drained
    <─────────────────────────────────────  connections

If the new server ends between ``take`` and ``serving``, the old one accepts again. ADDRESS.sock is a unix socket in a
folder that only its user can enter. A message is one packet: JSON, with file descriptors beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.metrics.log import Log

PATIENCE_S = 30.0  # for the answer of the other side
MAX_MESSAGE = 65_536
_PEER = struct.Struct("3i")  # pid, user, group
log = Log("handover")


@dataclass(frozen=True, slots=True)
class Sides:
    """What a running server does at each step. None of these may raise."""

    about: Callable[[], Mapping[str, Any]]  # state for a new server
    sockets: Callable[[], Mapping[str, socket.socket]]  # the listening sockets by name
    stop: Callable[[], Awaitable[bytes]]  # stop accepting, and return what clients may ask for later
    go_on: Callable[[], None]  # undo it
    leave: Callable[[Callable[[socket.socket], None]], None]  # give connections away and drain


class HandoverPoint:
    """The running server's side: it waits for a new server. Belongs to an event loop."""

    def __init__(self, address: tuple[str, int], sides: Sides) -> None:
        self._path = handover_path(address)
        self._sides = sides
        self._loop = asyncio.get_running_loop()
        self._left = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._listen = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The socket of a dead server, or of the one that this one has replaced.
        self._path.unlink(missing_ok=True)
        self._listen.bind(str(self._path))
        self._inode = self._path.stat().st_ino
        self._listen.listen(4)
        self._listen.setblocking(False)
        self._loop.add_reader(self._listen, self._accept)

    @classmethod
    def open(cls, address: tuple[str, int], sides: Sides) -> HandoverPoint | None:
        """Return the point; None, with a line in the log, where its folder cannot be used."""
        try:
            return cls(address, sides)
        except (OSError, ConfigError) as error:
            log.warning("handover_unavailable", error=str(error))
            return None

    def close(self) -> None:
        """Close it. A second call has no effect."""
        self._loop.remove_reader(self._listen)
        for task in self._tasks:
            task.cancel()
        self._listen.close()
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listen.accept()
            if _peer_user(sock) not in (os.getuid(), 0) or self._left:
                sock.close()
                return
            task = self._loop.create_task(self._serve(sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            sockets = self._sides.sockets()
            hello = {**self._sides.about(), "pid": os.getpid(), "sockets": list(sockets)}
            socket.send_fds(sock, [packed(hello)], [listening.fileno() for listening in sockets.values()])
            if await self._next(sock) == "take" and not self._left:
                await self._hand_over(sock)
        except OSError as error:
            log.warning("handover_failed", error=str(error))
        finally:
            if not self._left:
                sock.close()

    async def _hand_over(self, sock: socket.socket) -> None:
        self._left = True
        log.info("handing_over", to=_peer_pid(sock))
        state = await self._sides.stop()
        try:
            with tempfile.TemporaryFile() as file:
                file.write(state)
                file.flush()
                socket.send_fds(sock, [packed("yours")], [file.fileno()])
            serving = await asyncio.wait_for(self._next(sock), PATIENCE_S) == "serving"
        except (OSError, TimeoutError):
            serving = False
        if not serving:
            self._left = False
            log.error("handover_failed", error="the new server has ended; this one goes on")
            self._sides.go_on()
            return
        log.info("handed_over", to=_peer_pid(sock))
        self._sides.leave(lambda connection: _give(sock, connection))

    async def _next(self, sock: socket.socket) -> Any:
        """Return the next message, None at the end of the connection."""
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(sock, _wake, ready)
        try:
            await ready
            data = sock.recv(MAX_MESSAGE)
            return json.loads(data) if data else None
        finally:
            self._loop.remove_reader(sock)


def handover_path(address: tuple[str, int]) -> Path:
    """Return the path of the unix socket of the server that listens on ``address``, in this user's folder.

    Raises:
        ConfigError: the folder belongs to another user, or cannot be made.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "quire" if base else Path(tempfile.gettempdir()) / f"quire-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(f"The folder {folder} cannot be used: {error.strerror}.") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"The folder {folder} must be this user's alone (mode 700).")
    host, port = address
    return folder / f"{host.replace(':', '_')}-{port}.sock"


def _peer_user(sock: socket.socket) -> int:
    return int(_PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1])


def _peer_pid(sock: socket.socket) -> int:
    return int(_PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[0])


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def packed(message: Any) -> bytes:
    """Return the packet of a message."""
    return json.dumps(message).encode()


def _give(sock: socket.socket, connection: socket.socket) -> None:
    """Send a connection to the new server; if that one is gone, the connection is closed."""
    with connection, contextlib.suppress(OSError):
        sock.setblocking(True)  # it reads at once
        socket.send_fds(sock, [b"c"], [connection.fileno()])
