"""Images of Gemma 3: one square view of the whole, whatever its shape, between marks.

The pixels are those of transformers' Pillow processor without crops; the encoder's worker rescales and normalizes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from quire.images.prepared import Piece, PreparedImage
from quire.vision_spec import VisionSpec

if TYPE_CHECKING:
    from PIL.Image import Image

BEGIN, IMAGE, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


def prepare(image: Image, vision: VisionSpec) -> PreparedImage:
    """Return the piece of ``image``, in RGB, and the text that shows it."""
    how, edge = vision.preprocessing, vision.image_size
    assert how is not None
    image = image.resize((edge, edge), cast("Any", how.resample))
    data = np.asarray(image).transpose(2, 0, 1).tobytes()
    shown = IMAGE * vision.num_tokens((edge, edge))
    return PreparedImage(f"\n\n{BEGIN}{shown}{END}\n\n", (Piece((edge, edge), data),))
