"""`Span`: token positions whose rows are an encoder's output, in place of the embeddings of their token ids."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple


class Span(NamedTuple):
    """The tokens at positions ``start … start + length − 1`` of a prompt; their ids are the model's placeholder.

    ``content`` names what the encoder reads: a digest of ``data`` and ``grid``. It enters the hash of every block that
    has a token of the span, and names the encoder's output.
    """

    start: int
    length: int
    content: bytes  # 32 bytes
    grid: tuple[int, ...]  # size of the pixels: (height, width)
    # What the encoder reads, as the family's preprocessing makes it.
    data: bytes
    # Its tokens see each other both ways, so they are computed in one step.
    whole: bool = False

    @property
    def end(self) -> int:
        return self.start + self.length


def salted(spans: Sequence[Span], salt: str) -> tuple[Span, ...]:
    """Return ``spans`` under names that only callers with the same ``salt`` find again."""
    if not salt:
        return tuple(spans)
    key = blake2b(salt.encode()).digest()
    return tuple(
        span._replace(content=blake2b(span.content, digest_size=32, key=key).digest()) for span in spans
    )


def without_pixels(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return ``spans`` as logs hold them: digest, size and place, and nothing that an encoder could read."""
    return tuple(span._replace(data=b"") for span in spans)


def num_bytes(span: Span) -> int:
    """Return the bytes of what the encoder reads."""
    return len(span.data)
