"""uvicorn's WebSocket with a limit on what all clients have sent in parts."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from quire.http.connections import log
from quire.http.held_bytes import MESSAGES, HeldBytes

_TRY_AGAIN_LATER = 1013  # a WebSocket's close code


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket, closed where the parts of messages that all clients have sent are too many bytes."""

    _num_partial = 0  # bytes since the last whole message

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._bytes = HeldBytes(MESSAGES)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Count ``data`` and handle it."""
        self._num_partial += len(data)
        if self._bytes.grow(self._num_partial):
            super().data_received(data)
            return
        log.warning("websocket_messages_full", client=self.client)
        self._bytes.release()
        self.conn.send_close(_TRY_AGAIN_LATER)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.transport.close()

    def send_receive_event_to_app(self) -> None:
        super().send_receive_event_to_app()
        self._bytes.release()
        self._num_partial = 0

    def connection_lost(self, exc: Exception | None) -> None:
        self._bytes.release()
        super().connection_lost(exc)
