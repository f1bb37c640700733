"""`PreparedImage`: what a model's preprocessing makes of an image: pieces for its encoder, and the text around them."""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

from quire.spans import Span


class Piece(NamedTuple):
    """What the encoder reads at once. ``grid``: its size in pixels, (height, width)."""

    grid: tuple[int, ...]
    data: bytes

    def content(self) -> bytes:
        """Return the digest that names the piece."""
        fields = struct.pack(f"<{1 + len(self.grid)}Q", len(self.grid), *self.grid)
        return hashlib.blake2b(fields + self.data, digest_size=32, person=b"quire.piece.v1").digest()

    def span(self, start: int, length: int, *, whole: bool = False) -> Span:
        """Return the span of ``length`` tokens from ``start`` on that shows the piece. ``whole``: as of `Span`."""
        return Span(start, length, self.content(), self.grid, self.data, whole)


class PreparedImage(NamedTuple):
    """``text`` replaces an image's placeholder in a prompt; its runs of placeholders show ``pieces``, in order."""

    text: str
    pieces: tuple[Piece, ...]
