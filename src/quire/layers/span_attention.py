"""Attention of rows that see each other both ways, as the tokens of an image do (Gemma 3), among those that do not.

    position        0 1 2 3 4 5 6 7 8      span 3 … 6
    row 2 sees      ■ ■ ■
    row 3 sees      ■ ■ ■ ■ ■ ■ ■          all of its span, and what is before it; with a window, as far back as ever
    row 6 sees      ■ ■ ■ ■ ■ ■ ■
    row 7 sees      ■ ■ ■ ■ ■ ■ ■ ■

All rows are attended to as ever, and those of spans once more with the reference, whose bits depend on a row's own q
and on what it sees alone. A span is never cut by a step, so K and V of all of it are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.kernels.attention import attention
from quire.kernels.attention.batch import AttentionShape, RaggedBatch
from quire.kernels.kv_blocks import KvView

_KEY = ("both ways",)


@dataclass(frozen=True, slots=True)
class WholeSpan:
    """The rows of one span in a step: its last ones. ``seq``: which sequence of the step; ``end``: of the span."""

    seq: int
    first_row: int
    num_rows: int
    end: int


class BothWays:
    """What a step has of such rows; shared by all layers of a decoder."""

    def __init__(self) -> None:
        self.spans: Sequence[WholeSpan] = ()

    def around(self, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return ``attend`` of a layer with the rows of spans attended to both ways."""

        def attend_both(
            q: Tensor, kv: KvView, batch: RaggedBatch, shape: AttentionShape, sinks: Tensor | None, *, divided: bool
        ) -> Tensor:  # fmt: skip
            out = attend(q, kv, batch, shape, sinks, divided=divided)
            if self.spans:
                assert not divided
                rows, of_spans = batch.plan(_KEY, lambda: self._batch(batch))
                seen = attention(q.index_select(0, rows), kv, of_spans, replace(shape, both_ways=True), sinks)
                out.index_copy_(0, rows, seen)
            return out

        return attend_both

    def _batch(self, batch: RaggedBatch) -> tuple[Tensor, RaggedBatch]:
        """Return the rows of spans, and a batch in which each span is a sequence that ends with it."""
        counts = np.array([span.num_rows for span in self.spans])
        rows = np.concatenate([np.arange(s.first_row, s.first_row + s.num_rows) for s in self.spans])
        starts = np.concatenate(([0], np.cumsum(counts)))
        ends = np.array([span.end for span in self.spans])
        tables = batch.block_table[[span.seq for span in self.spans]]
        return torch.from_numpy(rows), RaggedBatch(starts, ends, tables)
