"""The bytes of an image file → its pixels in RGB, or `ImageError` with the reason.

What the file says about itself is applied: the camera's orientation (EXIF), transparency (on white), CMYK.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from quire.images.limits import LIMITS

if TYPE_CHECKING:
    from PIL.Image import Image

# Pillow is the extra `images`.
_pil: Any = import_module("PIL.Image") if find_spec("PIL") else None
_operations: Any = import_module("PIL.ImageOps") if find_spec("PIL") else None

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_SHALLOW = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
# What Pillow raises for contents that are damaged or hostile.
_DAMAGED = (OSError, ValueError, SyntaxError, TypeError, KeyError, IndexError, EOFError, ArithmeticError)


class ImageError(Exception):
    """The image cannot be used; the text says why, and what is allowed."""


def decode_image(data: bytes) -> Image:
    """Return the image in RGB, upright. Raises `ImageError`."""
    _pil.MAX_IMAGE_PIXELS = None  # the limits here come first, and say more
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _decoded(data)
        except (*_DAMAGED, struct.error, zlib.error) as error:
            raise ImageError(f"it is damaged or incomplete ({type(error).__name__})") from error


def _decoded(data: bytes) -> Image:
    try:
        image: Any = _pil.open(io.BytesIO(data), formats=FORMATS)
    except _pil.UnidentifiedImageError:
        raise ImageError(f"it is no image of a type that is supported: {', '.join(FORMATS)}") from None
    width, height = image.size
    if not 0 < width * height <= LIMITS.max_pixels or max(width, height) > LIMITS.max_edge:
        raise ImageError(
            f"it has {width} × {height} pixels, and at most {LIMITS.max_pixels} are allowed, {LIMITS.max_edge} along "
            "an edge"
        )
    if max(width, height) > LIMITS.max_ratio * min(width, height):
        raise ImageError(
            f"it has {width} × {height} pixels: one edge is more than {LIMITS.max_ratio} times the other"
        )
    if getattr(image, "n_frames", 1) > 1:
        raise ImageError(f"it is animated, with {image.n_frames} frames: send the one that matters")
    if image.mode not in _SHALLOW:
        raise ImageError(f"its pixels are of the kind {image.mode}: send one with 8 bits per channel")
    image.load()
    return _on_white(_operations.exif_transpose(image))


def _on_white(image: Any) -> Image:
    """Return ``image`` in RGB; what is transparent shows white."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        plain: Image = image.convert("RGB")
        return plain
    white = _pil.new("RGBA", image.size, (255, 255, 255, 255))
    shown: Image = _pil.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return shown
