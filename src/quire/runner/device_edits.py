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
from quire.kernels.sampling.triton import edit_rows
from quire.runner.step_upload import StepUpload
from quire.sampling.batch import RowEdits
from quire.text.grammar_matcher import bitmask_words

CHUNK = 1024  # ids of a program
LEAST_ROWS = 8  # of the table of counts
NO_FACTS = np.array([[-1, -1, 0, 0, 0, 0, 0, 0]], np.int64)

Ints = NDArray[np.int64]
Counted = tuple[torch.Tensor, torch.Tensor]  # rows whose draws are counted, and the row of the table of each


class DeviceEdits:
    """The tables on the device. Sequences are named by their `RowEdits`: one for each admission."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._counts = torch.empty(0, vocab_size, dtype=torch.int32, device=device)
        self._nothing = torch.zeros(1, dtype=torch.int32, device=device)  # of the type of both tables
        # [1, 8] each, as `edit_rows` reads them, with the number of biases last.
        self._facts_of: dict[RowEdits | None, Ints] = {}
        self._free: list[int] = []
        self._upload = StepUpload(device, torch.int64)
        self._masks = StepUpload(device, torch.int32)

    def forget(self, edits: RowEdits | None) -> None:
        """The sequence has gone. Steps in flight may count for it: whoever gets its row clears it behind them."""
        row = int(self._facts_of.pop(edits, NO_FACTS)[0, 0])
        if row >= 0:
            self._free.append(row)

    def apply(
        self, logits: torch.Tensor, edits: Sequence[RowEdits | None], masks: Mapping[int, NDArray[np.int32]]
    ) -> tuple[torch.Tensor, Counted]:
        """Return a changed copy of ``logits [rows, vocab_size]``, and what `count` is to be told with the ids drawn.

        ``masks``: row → bits of the ids allowed, `bitmask_words` of them.
        """
        fresh = self._take_in(edits)
        facts = np.concatenate([self._facts_of.get(of, NO_FACTS) for of in edits])
        facts[list(masks), 1] = np.arange(len(masks))
        facts[:, 6] = np.cumsum(facts[:, 7])
        facts[:, 5] = facts[:, 6] - facts[:, 7]
        ids: list[Ints] = [np.empty(0, np.int64)]
        biases: list[NDArray[np.float32]] = []
        for penalties in (of.penalties for of in edits if of is not None and of.penalties is not None):
            ids.append(penalties.bias_ids)
            biases.append(penalties.biases)
        rows = np.flatnonzero(facts[:, 0] >= 0)
        known: list[Ints] = []
        for penalties in (of.penalties for of in fresh if of.penalties is not None):
            drawn = penalties.output
            known += [penalties.seen.ids, drawn.ids, drawn.counts.astype(np.int64)]
        arrays = [
            facts,
            np.concatenate(ids),
            np.concatenate([np.empty(0), *biases], dtype=np.float64).view(np.int64),
            rows,
            facts[rows, 0],
        ]
        try:
            views = self._upload.put([*arrays, *known])
        except torch.OutOfMemoryError:
            for of in fresh:  # their rows of the table hold what was there before
                self.forget(of)
            raise
        facts_there, ids_there, biases_there, rows_there, of_there, *known_there = views
        for index, of in enumerate(fresh):
            seen, drawn_there, counts = known_there[3 * index : 3 * index + 3]
            row = self._counts[int(self._facts_of[of][0, 0])].zero_().index_fill_(0, seen, 1)
            row.index_add_(0, drawn_there, 2 * counts.to(torch.int32))
        words = bitmask_words(self._vocab_size)
        bits = self._masks.put([np.stack(list(masks.values()))])[0] if masks else self._nothing
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        edit_rows[(len(edits), triton.cdiv(self._vocab_size, CHUNK))](
            logits, logits.stride(0), out, facts_there, self._counts if len(rows) else self._nothing, bits, ids_there,
            biases_there, self._vocab_size, words, CHUNK=CHUNK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        for at, each in enumerate(edits):
            if each is not None and each.typical is not None:
                keep_typical(out[at], *each.typical)
        return out, (rows_there, of_there)

    def count(self, counted: Counted, drawn: torch.Tensor) -> None:
        """Count ``drawn [rows]`` int64."""
        places = counted[1] * self._vocab_size + drawn.index_select(0, counted[0])
        twos = torch.full(places.shape, 2, dtype=torch.int32, device=self._device)
        self._counts.view(-1).index_add_(0, places, twos)

    def _take_in(self, edits: Sequence[RowEdits | None]) -> list[RowEdits]:
        """Note the facts of those that are new; return those of them that got a row of the table, to be cleared."""
        new = [of for of in edits if of is not None and of.penalties is not None and of not in self._facts_of]
        fresh = [of for of in new if of.penalties is not None and of.penalties.counts]
        size = len(self._counts)
        if len(fresh) > len(self._free):
            larger = max(2 * size, size + len(fresh), LEAST_ROWS)
            counts = torch.empty(larger, self._vocab_size, dtype=torch.int32, device=self._device)
            counts[:size] = self._counts
            self._counts = counts
            self._free.extend(range(size, larger))
        for of in new:
            penalties = of.penalties
            assert penalties is not None
            facts = self._facts_of[of] = NO_FACTS.copy()
            numbers = (penalties.repetition, penalties.frequency, penalties.presence)
            facts[0, 2:5] = np.array(numbers, np.float64).view(np.int64)
            facts[0, 7] = len(penalties.bias_ids)
            if penalties.counts:
                facts[0, 0] = self._free.pop()
        return fresh
