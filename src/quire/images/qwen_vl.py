"""Images of Qwen2.5-VL and Qwen3-VL: one piece, which keeps its shape, with edges that are multiples of a token's.

The pixels are those of transformers' Pillow processor; the encoder's worker rescales and normalizes them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from quire.images.prepared import Piece, PreparedImage
from quire.vision_spec import VisionSpec

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE = "<|image_pad|>"


def prepare(image: Image, vision: VisionSpec) -> PreparedImage:
    """Return the piece of ``image``, in RGB, and the text that shows it."""
    how, edge = vision.preprocessing, vision.patch_size * vision.merge
    assert how is not None
    width, height = new_size(image.width, image.height, edge, how.min_pixels, how.max_pixels)
    image = image.resize((width, height), cast("Any", how.resample))
    data = np.asarray(image).transpose(2, 0, 1).tobytes()
    return PreparedImage(IMAGE * vision.num_tokens((height, width)), (Piece((height, width), data),))


def new_size(width: int, height: int, edge: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return (width, height) as multiples of ``edge`` with about that many pixels."""
    new_width, new_height = round(width / edge) * edge, round(height / edge) * edge
    if new_width * new_height > max_pixels:
        by = math.sqrt((height * width) / max_pixels)
        new_width, new_height = (max(edge, math.floor(side / by / edge) * edge) for side in (width, height))
    elif new_width * new_height < min_pixels:
        by = math.sqrt(min_pixels / (height * width))
        new_width, new_height = (math.ceil(side * by / edge) * edge for side in (width, height))
    return new_width, new_height
