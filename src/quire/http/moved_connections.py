"""Connections that another process has accepted, or goes on with."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterable

from quire.http.connections import WatchedProtocol


class Connector:
    """Serves connections that another process has accepted, in the running loop."""

    def __init__(self, make_protocol: Callable[[], asyncio.BaseProtocol] = asyncio.Protocol) -> None:
        # A server sets it when it starts.
        self.make_protocol = make_protocol
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_busy(self) -> bool:
        """Whether a connection is not yet among those of the server."""
        return bool(self._tasks)

    def __call__(self, sock: socket.socket, *, is_moved: bool = False) -> None:
        """Serve a connection. ``is_moved``: the other process has served it."""
        task = asyncio.create_task(self._connect(sock, is_moved))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, sock: socket.socket, is_moved: bool) -> None:
        try:
            _, made = await asyncio.get_running_loop().connect_accepted_socket(self.make_protocol, sock)
        except OSError:
            sock.close()  # the client is gone
            return
        if is_moved and isinstance(made, WatchedProtocol):
            made.expect_request()


def give_idle(
    connections: Iterable[WatchedProtocol], give: Callable[[socket.socket], None], *, is_tls: bool
) -> bool:
    """Give each connection away that is between two requests, the others after their answer; whether one is not.

    TLS cannot be given away: such a connection is closed with its next answer.
    """

    def move(connection: WatchedProtocol) -> None:
        if connection.is_idle and not connection.transport.get_write_buffer_size():
            copy = socket.socket(fileno=os.dup(connection.transport.get_extra_info("socket").fileno()))
            connection.transport.abort()  # closes this process's descriptor alone
            give(copy)

    is_busy = False
    for connection in connections:
        connection.closes = is_tls
        if not is_tls:
            connection.on_idle = move
            move(connection)
        is_busy = is_busy or not (connection.is_idle or connection.transport.is_closing())
    return is_busy
