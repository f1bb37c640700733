"""Bodies that a client has coded (RFC 9110, 8.4): decoded in steps, under the limit of the body."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, Protocol

from quire.errors import RequestError, clip
from quire.extras import install_command
from quire.http.refusals import HttpError, Refusal
from quire.units import PIECE_BYTES

try:
    import zstandard
except ImportError:  # the extra `zstd`
    zstandard = None  # type: ignore[assignment]

STEP_BYTES = PIECE_BYTES  # decoded at once; then other requests have their turn
_RAW = -zlib.MAX_WBITS
_ZSTD_SLICE_BYTES = 512
_ZSTD_WINDOW_BYTES = 8 << 20  # every decoder must take it (RFC 8878, 3.1.1.1.2)
_GZIP = 16 + zlib.MAX_WBITS


class Decoder(Protocol):
    """Decodes the pieces of one body."""

    def decode(self, piece: bytes) -> Iterator[bytes]:
        """Yield what ``piece`` gives, `STEP_BYTES` at most each time. Raises `RequestError`."""
        ...

    def end(self) -> None:
        """The body has ended. Raises `RequestError` where its coding has not."""
        ...


class Deflated:
    """gzip, of one member or several, and deflate, with zlib's head or without, as clients send both."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._rest: Any = None  # decoder of this member
        self._first = b""  # two bytes tell which deflate it is

    def decode(self, piece: bytes) -> Iterator[bytes]:
        piece = self._first + piece
        self._first = b""
        if self._rest is None and len(piece) < 2:
            self._first = piece
            return
        try:
            yield from self._steps(piece)
        except zlib.error as error:
            raise _damaged(self._coding, str(error)) from None

    def _steps(self, piece: bytes) -> Iterator[bytes]:
        while piece:
            if self._rest is None:
                self._rest = zlib.decompressobj(self._kind(piece))
            yield self._rest.decompress(piece, STEP_BYTES)
            piece = self._rest.unconsumed_tail
            if self._rest.eof:
                piece = self._rest.unused_data
                if piece and self._coding != "gzip":
                    raise _damaged(self._coding, "there is more behind its end")
                if piece:
                    self._rest = None

    def _kind(self, piece: bytes) -> int:
        if self._coding == "gzip":
            return _GZIP
        has_head = piece[0] & 15 == 8 and (piece[0] << 8 | piece[1]) % 31 == 0
        return zlib.MAX_WBITS if has_head else _RAW

    def end(self) -> None:
        if self._first or self._rest is None or not self._rest.eof:
            raise _damaged(self._coding, "it ends too early")


class Zstandard:
    """zstd, of one frame or several."""

    def __init__(self) -> None:
        self._frames = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
        self._frame: Any = None

    def decode(self, piece: bytes) -> Iterator[bytes]:
        """Three bytes can stand for a block of 128 KiB, so a slice gives 22 MiB at most."""
        for start in range(0, len(piece), _ZSTD_SLICE_BYTES):
            yield self._slice(piece[start : start + _ZSTD_SLICE_BYTES])

    def _slice(self, data: bytes) -> bytes:
        parts = []
        try:
            while data:
                if self._frame is None or self._frame.eof:
                    self._frame = self._frames.decompressobj()
                parts.append(self._frame.decompress(data))
                data = self._frame.unused_data
        except zstandard.ZstdError as error:
            raise _damaged("zstd", str(error)) from None
        return b"".join(parts)

    def end(self) -> None:
        if self._frame is None or not self._frame.eof:
            raise _damaged("zstd", "it ends too early")


def find_decoder(coding: bytes | None) -> Decoder | None:
    """Return the decoder of a ``Content-Encoding``, None where nothing is to be decoded.

    Raises:
        HttpError: 415, with the coding's name.
    """
    name = (coding or b"").decode("latin-1").strip().lower()
    if name in ("", "identity"):
        return None
    if name in ("gzip", "x-gzip"):
        return Deflated("gzip")
    if name == "deflate":
        return Deflated("deflate")
    if name == "zstd" and zstandard is not None:
        return Zstandard()
    known = "gzip, deflate, zstd" if zstandard is not None else "gzip, deflate"
    hint = f"; zstd needs the extra zstd here ({install_command('zstd')})" if name == "zstd" else ""
    text = (
        f"Content-Encoding {clip(name)} is not supported: send the body as it is, or coded by {known}{hint}."
    )
    headers = ((b"accept-encoding", known.encode()),)
    raise HttpError(Refusal(415, text, code="unsupported_content_encoding", headers=headers))


def _damaged(coding: str, reason: str) -> RequestError:
    return RequestError(
        f"The body is not {coding}, as its Content-Encoding says: {reason}.", code="invalid_encoding"
    )
