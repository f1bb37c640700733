"""Preprocessing equals that of transformers' Pillow processors, for images of every shape."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL", reason="the extra `images` is not installed")

from tests.images.tiny_vlm import LONGEST, TILE, make_image, make_model
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from quire.images.idefics3 import prepare
from quire.models.checkpoint import describe
from quire.models.vision.pixels import pixel_values
from quire.vision_spec import VisionSpec

SIZES = [
    (48, 48),
    (100, 37),
    (37, 100),
    (7, 5),
    (1, 1),
    (300, 10),
    (16, 16),
    (17, 16),
    (333, 250),
    (640, 479),
]


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> VisionSpec:
    folder: Path = tmp_path_factory.mktemp("vlm")
    make_model(folder)
    spec = describe(folder).spec.vision
    assert spec is not None
    return spec


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_pixels_equal_those_of_transformers(size: tuple[int, int], vision: VisionSpec) -> None:
    image = make_image(*size)
    how = vision.preprocessing
    assert how is not None
    theirs = SmolVLMImageProcessorPil(
        size={"longest_edge": LONGEST},
        max_image_size={"longest_edge": TILE},
        image_mean=how.mean,
        image_std=how.std,
        return_row_col_info=True,
    )([image], return_tensors="np")
    prepared = prepare(image, vision)
    table = pixel_values(vision)
    for piece, expected in zip(prepared.pieces, theirs["pixel_values"][0], strict=True):
        pixels = np.frombuffer(piece.data, np.uint8).reshape(3, *piece.grid)
        mine = np.stack([table[channel][pixels[channel]] for channel in range(3)])
        np.testing.assert_array_equal(mine, expected)
    rows, columns = theirs["rows"][0][0], theirs["cols"][0][0]
    assert prepared.text.count("<row_") == rows * columns == len(prepared.pieces) - 1 or rows == 0


def test_digest_of_piece_depends_on_pixels_and_grid(vision: VisionSpec) -> None:
    first, second = (prepare(make_image(48, 48, seed), vision).pieces for seed in (0, 1))
    assert len({piece.content() for piece in (*first, *second)}) == len(first) + len(second)
    assert first[0]._replace(grid=(8, 32)).content() != first[0].content()
