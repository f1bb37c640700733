"""`AxisAngles`: rotary positions with three axes (M-RoPE, arXiv:2409.12191) for the rows of a step.

    tokens        a  b  ▒  ▒  ▒  ▒  ▒  ▒  c  d          an image of 2 rows and 3 columns of tokens
    position      0  1  2  3  4  5  6  7  8  9          in the sequence: what the cache and all counts go by
    time          0  1  2  2  2  2  2  2  5  6
    height        0  1  2  2  2  3  3  3  5  6          a text goes on after the largest
    width         0  1  2  3  4  2  3  4  5  6

A row of a text has one angle, whose row in the decoder's table is another one than its position says. The rows of an
image are put together of three rows of the table, behind its end. All follow from the spans of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from quire.layers.rope import RopeTable
from quire.runner.input_batch import PreparedStep
from quire.runner.sequences import WorkerSeq
from quire.spans import Span
from quire.step import SeqPlan
from quire.vision_spec import VisionSpec

IntArray = npt.NDArray[np.int64]


class AxisAngles:
    """Writes, for each token of a step, which row of the decoder's tables has its angles."""

    def __init__(self, vision: VisionSpec, tables: Sequence[RopeTable], max_tokens: int) -> None:
        """``max_tokens``: of a step. Every table has room for as many rows behind its end from then on."""
        self._edge = vision.patch_size * vision.merge
        self._tables = tables
        self._axes = torch.tensor(vision.axes).view(1, 1, -1)  # [1, 1, pairs]
        for table in tables:
            table.extend(max_tokens)

    def place(self, step: PreparedStep, plans: Sequence[SeqPlan], seqs: Sequence[WorkerSeq]) -> None:
        """Write the rows of ``step``, whose positions the tables cover."""
        places, used = step.buffers.positions, 0
        for index, (plan, seq) in enumerate(zip(plans, seqs, strict=True)):
            if not seq.spans:
                continue
            start, end = step.buffers.cu_seqlens_q[index : index + 2].tolist()
            begin = plan.num_computed_tokens
            if begin >= seq.spans[-1].end:
                places[start:end] += shift_after(seq.spans, self._edge)
                continue
            axes = axes_of(seq.spans, begin, begin + end - start, self._edge)
            in_image = np.flatnonzero((axes[0] != axes[1]) | (axes[0] != axes[2]))
            places[start:end] = axes[0]
            if in_image.size:
                places[start + in_image] = self._mixed(axes[:, in_image], used)
                used += in_image.size

    def _mixed(self, axes: IntArray, used: int) -> IntArray:
        """Put rows together behind the tables; return where they are. ``axes [3, rows]``."""
        rows, count = torch.from_numpy(axes), axes.shape[1]
        first = self._tables[0].num_positions + used
        for table in self._tables:
            table.extend(used + count)
            for values in table.tables:
                three = values[rows]  # [3, count, pairs]
                values[first : first + count] = torch.gather(three, 0, self._axes.expand(1, count, -1))[0]
        return np.arange(first, first + count)


def axes_of(spans: Sequence[Span], begin: int, end: int, edge: int) -> IntArray:
    """Return the place on each axis of the positions ``begin … end − 1``: ``[3, count]``. ``edge``: of a token."""
    axes, shift = np.tile(np.arange(begin, end), (3, 1)), 0
    for span in spans:
        if span.start >= end:
            break
        first, stop = max(span.start, begin), min(span.end, end)
        if first < stop:
            columns, inside = span.grid[1] // edge, np.arange(first - span.start, stop - span.start)
            grid = np.stack((inside * 0, inside // columns, inside % columns))
            axes[:, first - begin : stop - begin] = span.start + shift + grid
        shift += shift_after((span,), edge)
        after = max(span.end - begin, 0)
        axes[:, after:] = np.arange(begin + after, end) + shift
    return axes


def shift_after(spans: Sequence[Span], edge: int) -> int:
    """Return how far a text after ``spans`` lies from its position: 0 or less."""
    return sum(max(span.grid) // edge - span.length for span in spans)
