"""Images of Idefics 3 and SmolVLM: tiles of equal size, row by row, then one view of the whole.

    2 rows, 3 columns       <fake><row_1_col_1>▒…▒<fake><row_1_col_2>▒…▒<fake><row_1_col_3>▒…▒
    ┌───┬───┬───┐           <fake><row_2_col_1>▒…▒ …
    │   │   │   │
    ├───┼───┼───┤           <fake><global-img>▒…▒<fake>
    │   │   │   │
    └───┴───┴───┘           ▒…▒: the tokens of a tile

The pixels are those of transformers' Pillow processors; the encoder's worker rescales and normalizes them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from quire.images.prepared import Piece, PreparedImage
from quire.vision_spec import VisionSpec

if TYPE_CHECKING:
    from PIL.Image import Image

FAKE, IMAGE, GLOBAL = "<fake_token_around_image>", "<image>", "<global-img>"


def prepare(image: Image, vision: VisionSpec) -> PreparedImage:
    """Return the pieces of ``image``, in RGB, and the text that shows them."""
    how = vision.preprocessing
    assert how is not None
    tile, filter_ = how.tile, cast("Any", how.resample)
    image = image.resize(first_size(image.width, image.height, how.size), filter_)
    if not how.splits:
        return _laid_out([image.resize((tile, tile), filter_)], 0, 0, vision)
    image = image.resize(tiled_size(image.width, image.height, tile), filter_)
    columns, rows = image.width // tile, image.height // tile
    if (columns, rows) == (1, 1):
        return _laid_out([image], 0, 0, vision)
    tiles = [
        image.crop((column * tile, row * tile, (column + 1) * tile, (row + 1) * tile))
        for row in range(rows)
        for column in range(columns)
    ]
    return _laid_out([*tiles, image.resize((tile, tile), filter_)], rows, columns, vision)


def first_size(width: int, height: int, longest: int) -> tuple[int, int]:
    """Return (width, height) with the longest edge at ``longest``; the other edge is even."""
    ratio, most = width / height, 4096  # pixels
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > most:
        width, height = most, int(most / ratio)
    elif height > width and height > most:
        width, height = int(most * ratio), most
    return max(width, 1), max(height, 1)


def tiled_size(width: int, height: int, tile: int) -> tuple[int, int]:
    """Return (width, height) as multiples of ``tile``."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return width, height


def _laid_out(tiles: list[Image], rows: int, columns: int, vision: VisionSpec) -> PreparedImage:
    shown = IMAGE * vision.num_tokens((vision.image_size, vision.image_size))
    text = "".join(
        "".join(f"{FAKE}<row_{row + 1}_col_{column + 1}>{shown}" for column in range(columns)) + "\n"
        for row in range(rows)
    )
    text += ("\n" if rows else "") + f"{FAKE}{GLOBAL}{shown}{FAKE}"
    pieces = tuple(
        Piece((tile.height, tile.width), np.asarray(tile).transpose(2, 0, 1).tobytes()) for tile in tiles
    )
    return PreparedImage(text, pieces)
