"""Positions with three axes: those of each token of a prompt with images, in one piece and in chunks."""

from __future__ import annotations

import numpy as np
import pytest

from quire.runner.axes import axes_of, shift_after
from quire.spans import Span

EDGE = 8
# Two rows and three columns of tokens, one token, three rows and one column.
SPANS = (
    Span(2, 6, b"a", (16, 24), b""),
    Span(10, 1, b"b", (8, 8), b""),
    Span(11, 3, b"c", (24, 8), b""),
)
TIME = [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8, 8, 8, 11, 12]
HEIGHT = [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9, 10, 11, 12]
WIDTH = [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 8, 8, 11, 12]


def test_text_goes_on_after_largest_axis_of_image() -> None:
    np.testing.assert_array_equal(axes_of(SPANS, 0, 16, EDGE), [TIME, HEIGHT, WIDTH])
    assert shift_after(SPANS, EDGE) == 12 - 15


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 16])
def test_axes_do_not_depend_on_chunks(size: int) -> None:
    chunks = [axes_of(SPANS, begin, min(begin + size, 16), EDGE) for begin in range(0, 16, size)]
    np.testing.assert_array_equal(np.concatenate(chunks, axis=1), [TIME, HEIGHT, WIDTH])
