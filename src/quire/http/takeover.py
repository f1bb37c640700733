"""`Takeover`: what ``--handover`` adds, a server that takes over from the one that runs (`quire.http.handover`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.http.front import FDS_AT_ONCE
from quire.http.handover import MAX_MESSAGE, PATIENCE_S, handover_path, packed
from quire.http.listen import take_connections
from quire.metrics.log import Log

_HELP = "Start without --handover."
log = Log("handover")


@dataclass(slots=True, eq=False)
class Takeover:
    """The new server's side, of `quire.http.handover`. ``sockets``: the listening sockets by name."""

    about: Mapping[str, Any]
    sockets: dict[str, socket.socket]
    _sock: socket.socket
    _serve: Callable[[socket.socket], None] = field(default=lambda connection: connection.close())

    @classmethod
    def from_address(cls, address: tuple[str, int]) -> Takeover:
        """Connect to the server that serves ``address``.

        Raises:
            ConfigError: there is none, it is dead, of another user, or does not answer.
        """
        host, port = address
        path = handover_path(address)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(PATIENCE_S)
            sock.connect(str(path))
            data, fds, _, _ = socket.recv_fds(sock, MAX_MESSAGE, FDS_AT_ONCE)
            about = json.loads(data) if data else {}
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            raise ConfigError(_nobody(host, port, path), param="handover") from None
        except OSError as error:
            sock.close()
            raise ConfigError(f"--handover: the server of {host}:{port} does not answer: {error}.") from None
        if len(about.get("sockets", ())) != len(fds) or not fds:
            sock.close()
            raise ConfigError(f"--handover: the server of {host}:{port} is handing over already, or ends.")
        sockets = {name: socket.socket(fileno=fd) for name, fd in zip(about["sockets"], fds, strict=True)}
        return cls(about, sockets, sock)

    @property
    def unclaimed_bytes(self) -> int:
        """Memory that the running server may still take: what it has planned, less what its processes hold now."""
        return max(0, int(self.about["engine_bytes"]) - _children_bytes(int(self.about["pid"])))

    def take(self) -> bytes:
        """Have the old server accept no more; return what it kept in memory for clients.

        Raises:
            ConfigError: it has ended meanwhile.
        """
        try:
            self._sock.send(packed("take"))
            data, fds, _, _ = socket.recv_fds(self._sock, MAX_MESSAGE, 1)
            if data and fds:
                with os.fdopen(fds[0], "rb") as file:
                    file.seek(0)
                    return file.read()
            reason = "it has ended"
        except OSError as error:
            reason = str(error)
        raise ConfigError(f"--handover: the running server did not hand over: {reason}.")

    def serving(self, serve: Callable[[socket.socket], None]) -> None:
        """Tell that this server accepts. From now on ``serve`` gets the connections of the old one."""
        self._serve = serve
        with contextlib.suppress(OSError):  # it has ended: what it had is gone with it
            self._sock.send(packed("serving"))
        self._sock.setblocking(False)
        asyncio.get_running_loop().add_reader(self._sock, self._read)

    def _read(self) -> None:
        if not take_connections(self._sock, 16, FDS_AT_ONCE, self._serve):
            self.close()
            log.info("old_server_ended")

    def close(self) -> None:
        """Close the connection to the old server: one that has not handed over goes on. No effect once closed."""
        if self._sock.fileno() >= 0:
            with contextlib.suppress(RuntimeError):  # no loop runs
                asyncio.get_running_loop().remove_reader(self._sock)
            self._sock.close()


def _children_bytes(pid: int) -> int:
    """Return the resident memory of a process's children."""
    total = 0
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                with contextlib.suppress(OSError):
                    pages = int(Path(f"/proc/{child}/statm").read_text().split()[1])
                    total += pages * os.sysconf("SC_PAGESIZE")
    return total


def _nobody(host: str, port: int, path: Path) -> str:
    """Say why no server of this user can be reached for ``host:port``."""
    user = _listener_user(port)
    if user is None:
        stale = " (its last server is dead)" if path.exists() else ""
        return f"--handover: no server listens on {host}:{port}{stale}. {_HELP}"
    if user != os.getuid():
        return (
            f"--handover: {host}:{port} is served by a process of the user {_name(user)}; only a server of the same "
            f"user, {_name(os.getuid())} here, can take it over."
        )
    others = sorted(
        other.stem.removesuffix(f"-{port}").replace("_", ":")
        for other in path.parent.glob(f"*-{port}.sock")
        if other != path
    )
    known = f" A server of this user has --host {', '.join(others)}: give the same." if others else ""
    return f"--handover: what listens on port {port} is no running `quire serve` of {host}:{port}.{known}"


def _listener_user(port: int) -> int | None:
    """Return the user whose process listens on a TCP port of this machine, None if there is none."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                    return int(words[7])
    return None


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
