"""Bias, penalties and masks of rows on a GPU, where nothing waits for the host.

How often a sequence drew each id is counted there by the draw itself, so a step does not need the ids of the one
before on the host. The table has a row of int32 ``[vocab_size]`` for each sequence with penalties, and doubles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from quire.kernels.sampling import keep_typical
from quire.kernels.sampling.edit_triton_kernels import edit_rows
from quire.runner.step_upload import StepUpload
from quire.sampling.batch import RowEdits
from quire.text.grammar_matcher import bitmask_words

CHUNK = 1024  # ids of a program
LEAST_ROWS = 8  # of the table of counts

Ints = NDArray[np.int64]
Counted = tuple[torch.Tensor, torch.Tensor]  # rows whose draws are counted, and the row of the table of each


class DeviceEdits:
    """The tables on the device. Sequences are named by their `RowEdits`: one for each admission."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._counts = torch.empty(0, vocab_size, dtype=torch.int32, device=device)
        self._nothing = torch.zeros(1, dtype=torch.int32, device=device)  # of the type of both tables
        self._row_of: dict[RowEdits, int] = {}
        self._free: list[int] = []
        self._upload = StepUpload(device, torch.int64)
        self._masks = StepUpload(device, torch.int32)

    def forget(self, edits: RowEdits | None) -> None:
        """The sequence has gone. Steps in flight may count for it: whoever gets its row clears it behind them."""
        if edits in self._row_of:
            row = self._row_of.pop(edits)
            self._free.append(row)

    def apply(
        self, logits: torch.Tensor, edits: Sequence[RowEdits | None], masks: Mapping[int, NDArray[np.int32]]
    ) -> tuple[torch.Tensor, Counted]:
        """Return a changed copy of ``logits [rows, vocab_size]``, and what `count` is to be told with the ids drawn.

        ``masks``: row → bits of the ids allowed, `bitmask_words` of them.
        """
        fresh = self._take_rows(edits)
        facts = np.zeros((len(edits), 8), np.int64)
        facts[:, :2] = -1
        facts[list(masks), 1] = np.arange(len(masks))
        ids: list[Ints] = [np.empty(0, np.int64)]
        biases = [np.empty(0, np.float64)]
        for at, of in enumerate(edits):
            penalties = None if of is None else of.penalties
            if penalties is not None:
                assert of is not None
                numbers = (penalties.repetition, penalties.frequency, penalties.presence)
                facts[at, 0] = self._row_of.get(of, -1)
                facts[at, 2:5] = np.array(numbers, np.float64).view(np.int64)
                facts[at, 5] = sum(map(len, ids))
                ids.append(penalties.bias_ids)
                biases.append(penalties.biases.astype(np.float64))
                facts[at, 6] = facts[at, 5] + len(ids[-1])
        rows = np.flatnonzero(facts[:, 0] >= 0)
        known: list[Ints] = []
        for penalties in (of.penalties for of in fresh if of.penalties is not None):
            drawn = penalties.output
            known += [penalties.seen.ids, drawn.ids, drawn.counts.astype(np.int64)]
        arrays = [facts, np.concatenate(ids), np.concatenate(biases).view(np.int64), rows, facts[rows, 0]]
        try:
            views = self._upload.put([*arrays, *known])
        except torch.OutOfMemoryError:
            for of in fresh:  # their rows of the table hold what was there before
                self.forget(of)
            raise
        facts_there, ids_there, biases_there, rows_there, of_there, *known_there = views
        for index, of in enumerate(fresh):
            seen, drawn_there, counts = known_there[3 * index : 3 * index + 3]
            row = self._counts[self._row_of[of]].zero_().index_fill_(0, seen, 1)
            row.index_add_(0, drawn_there, 2 * counts.to(torch.int32))
        words = bitmask_words(self._vocab_size)
        bits = self._masks.put([np.stack(list(masks.values()))])[0] if masks else self._nothing
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        edit_rows[(len(edits), triton.cdiv(self._vocab_size, CHUNK))](
            logits, logits.stride(0), out, facts_there, self._counts if len(rows) else self._nothing, bits, ids_there,
            biases_there, self._vocab_size, words, CHUNK=CHUNK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        for at, of in enumerate(edits):
            if of is not None and of.typical is not None:
                keep_typical(out[at], *of.typical)
        return out, (rows_there, of_there)

    def count(self, counted: Counted, drawn: torch.Tensor) -> None:
        """Count ``drawn [rows]`` int64."""
        places = counted[1] * self._vocab_size + drawn.index_select(0, counted[0])
        twos = torch.full(places.shape, 2, dtype=torch.int32, device=self._device)
        self._counts.view(-1).index_add_(0, places, twos)

    def _take_rows(self, edits: Sequence[RowEdits | None]) -> list[RowEdits]:
        """Give rows of the table to those that need one and have none; return them."""
        wanted = [of for of in edits if of is not None and of.penalties is not None and of.penalties.counts]
        fresh = [of for of in wanted if of not in self._row_of]
        size = len(self._counts)
        if len(fresh) > len(self._free):
            larger = max(2 * size, size + len(fresh), LEAST_ROWS)
            counts = torch.empty(larger, self._vocab_size, dtype=torch.int32, device=self._device)
            counts[:size] = self._counts
            self._counts = counts
            self._free.extend(range(size, larger))
        self._row_of.update((of, self._free.pop()) for of in fresh)
        return fresh
