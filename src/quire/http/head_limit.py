"""`LimitedProtocol`: uvicorn's HTTP protocol, with a limit on the bytes of a request's head, which it lacks."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
_REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-type: text/plain\r\n"
    b"content-length: 42\r\n\r\nThe head of a request has at most 64 KiB.\n"
)


class LimitedProtocol(HttpToolsProtocol):
    """Answers 431 and closes the connection once a head has more than `MAX_HEAD_BYTES`, plus one read."""

    _head_bytes = -1  # of the head that is being read; -1: none is

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = -1
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_bytes < 0 or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.transport.write(_REFUSAL)
            self.transport.close()
