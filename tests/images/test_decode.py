"""What a file says about its own pixels is applied, and each kind of hostile file is refused with its reason."""

from __future__ import annotations

import io
import zlib
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="the extra `images` is not installed")

from PIL import Image
from tests.images.hostile import BOMB, HOSTILE, file_of

from quire.images.decode import ImageError, decode_image

PICTURE = Image.fromarray(np.random.default_rng(1).integers(0, 256, (6, 9, 3), dtype=np.uint8))


def pixels(image: Image.Image) -> Any:
    return np.asarray(image)


def test_orientation_of_camera_is_applied() -> None:
    """In all eight ways of EXIF; the file's pixels are those of the sensor."""
    turned = {
        1: [], 2: [Image.Transpose.FLIP_LEFT_RIGHT], 3: [Image.Transpose.ROTATE_180],
        4: [Image.Transpose.FLIP_TOP_BOTTOM], 5: [Image.Transpose.TRANSPOSE], 6: [Image.Transpose.ROTATE_90],
        7: [Image.Transpose.TRANSVERSE], 8: [Image.Transpose.ROTATE_270],
    }  # fmt: skip
    for orientation, ways in turned.items():
        exif, stored = Image.Exif(), PICTURE
        exif[0x0112] = orientation
        for way in ways:
            stored = stored.transpose(way)
        decoded = decode_image(file_of(stored, "PNG", exif=exif.tobytes()))
        assert np.array_equal(pixels(decoded), pixels(PICTURE)), orientation


def test_transparent_pixels_show_white() -> None:
    layered = PICTURE.convert("RGBA")
    layered.putpixel((0, 0), (10, 20, 30, 0))
    layered.putpixel((1, 0), (0, 0, 0, 128))
    decoded = pixels(decode_image(file_of(layered)))
    assert decoded[0, 0].tolist() == [255, 255, 255]
    assert abs(decoded[0, 1].astype(int) - 127).max() <= 1
    assert np.array_equal(decoded[1:], pixels(PICTURE)[1:])
    palette = Image.new("P", (2, 1))
    palette.putpalette([0, 0, 0, 9, 8, 7])
    palette.putpixel((1, 0), 1)
    assert pixels(decode_image(file_of(palette, transparency=0))).tolist() == [[[255] * 3, [9, 8, 7]]]


def test_inks_and_greys_become_colours() -> None:
    inks = Image.new("CMYK", (4, 4), (0, 255, 255, 0))
    red = pixels(decode_image(file_of(inks, "JPEG", quality=100)))
    assert (abs(red.astype(int) - [255, 0, 0]) <= 3).all()
    for mode in ("L", "1", "P"):
        image = PICTURE.convert(mode)
        assert np.array_equal(pixels(decode_image(file_of(image))), pixels(image.convert("RGB"))), mode


def test_each_hostile_file_is_refused_with_its_reason() -> None:
    for name, (data, reason) in HOSTILE.items():
        with pytest.raises(ImageError) as error:
            decode_image(data)
        assert reason in str(error.value), name


def test_file_that_is_cut_anywhere_is_refused_or_whole() -> None:
    """No cut gives other pixels than the whole file."""
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        data = file_of(PICTURE, kind)
        whole = pixels(decode_image(data))
        for length in range(0, len(data), 7):
            try:
                decoded = decode_image(data[:length])
            except ImageError:
                continue
            assert np.array_equal(pixels(decoded), whole), (kind, length, len(data))


def test_bomb_is_refused_before_its_pixels_are_made() -> None:
    """Its header alone says how large it is; the data behind it is never decompressed."""
    assert len(BOMB) < 2000
    assert zlib.crc32(BOMB)
    with pytest.raises(ImageError, match="60000 × 60000"):
        decode_image(BOMB)
    assert io.BytesIO(BOMB).read(8) == b"\x89PNG\r\n\x1a\n"
