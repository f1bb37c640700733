"""Image files that hide something: bombs, cuts, lies about sizes and types; and harmless ones of every kind."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image
from tests.images.tiny_vlm import make_image


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(width: int, height: int, data: bytes, depth: int = 8, colours: int = 2) -> bytes:
    """Return a PNG file that says it has these sizes, whatever ``data`` has."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0)),
        (b"IDAT", data),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


PICTURE = make_image(64, 50, 1)
NOISE = np.random.default_rng(0).integers(0, 256, 3000, dtype=np.uint8).tobytes()
BOMB = png(60_000, 60_000, zlib.compress(bytes(1000)))
# Each with a part of the reason that names what is wrong.
HOSTILE: dict[str, tuple[bytes, str]] = {
    "bomb": (BOMB, "60000 × 60000 pixels"),
    "line": (png(100_000, 1, zlib.compress(bytes(300_001))), "along an edge"),
    "thread": (file_of(Image.new("RGB", (10_000, 1))), "one edge is more than"),
    "no pixels": (png(0, 7, zlib.compress(b"")), "no image of a type"),
    "too few pixels": (png(900, 900, zlib.compress(bytes(1000))), "damaged"),
    "noise for pixels": (png(64, 64, NOISE), "damaged"),
    "truncated png": (file_of(PICTURE)[:900], "damaged"),
    "truncated jpeg": (file_of(PICTURE, "JPEG")[:500], "damaged"),
    "truncated webp": (file_of(PICTURE, "WEBP")[:300], "damaged"),
    "animated gif": (file_of(PICTURE, "GIF", save_all=True, append_images=[make_image(64, 50, 2)]), "animated"),
    "animated webp": (
        file_of(PICTURE, "WEBP", save_all=True, append_images=[make_image(64, 50, 2)]), "animated",
    ),
    "animated png": (
        file_of(PICTURE, "PNG", save_all=True, append_images=[make_image(64, 50, 2)]), "animated",
    ),
    "deep": (file_of(Image.fromarray(np.full((9, 9), 40_000, np.uint16))), "8 bits per channel"),
    "text": (b"hello", "no image of a type"),
    "noise": (NOISE, "no image of a type"),
    "tiff": (file_of(PICTURE, "TIFF"), "no image of a type"),
    "icon": (file_of(PICTURE, "ICO"), "no image of a type"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image of a type"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>", "no image of a"),
}  # fmt: skip
# 30 million pixels of one colour in a small file: allowed, and decoded in about a second.
LARGE = png(6000, 5000, zlib.compress(bytes(5000 * 18_001), 9))
HARMLESS = {
    "png": file_of(PICTURE),
    "jpeg": file_of(PICTURE, "JPEG"),
    "webp": file_of(PICTURE, "WEBP"),
    "gif": file_of(PICTURE, "GIF"),
    "bmp": file_of(PICTURE, "BMP"),
    "cmyk": file_of(PICTURE.convert("CMYK"), "JPEG"),
    "alpha": file_of(PICTURE.convert("RGBA")),
    "palette": file_of(PICTURE.convert("P")),
    "grey": file_of(PICTURE.convert("L")),
}
