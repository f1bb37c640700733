"""`DeviceSampler`: the draws of a GPU's steps, launched behind the forward and not waited for.

What the host must know of a row before it may draw decides what waits:

    temperature, top_k, top_p, min_p, logprobs           nothing: `kernels.sampling.triton`
    bias, penalties, allowed_token_ids, min_tokens       nothing: the device counts, and masks depend on the number
    grammars, thinking_budget, bad_words of several ids  its last id: the step before is waited for, while the device
                                                         computes the forward that was launched first
    typical_p                                            its logits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quire.kernels.sampling.reference import EDITED, assemble, logprob_tensors
from quire.kernels.sampling.triton import facts_of, logprobs_wanted, sample_rows, truncated
from quire.request import TokenLogprobs
from quire.runner.device_edits import DeviceEdits
from quire.runner.grammars import Entry, Grammars
from quire.runner.step_upload import StepUpload, recorded_event
from quire.sampling.batch import RowEdits, SamplerBatch
from quire.sampling.rng import Purpose
from quire.sampling.sampler import ALL_FORBIDDEN, NOT_FINITE, SeqSample
from quire.step import NewSeq


@dataclass(slots=True)
class Draws:
    """A step's draws on their way to the host; a call waits for them, and has them from then on."""

    ids: torch.Tensor
    best: torch.Tensor  # the largest logits, not finite where a row failed
    logprobs: tuple[torch.Tensor, ...]
    logprob_rows: NDArray[np.int64]
    num_logprobs: list[int]
    errors: dict[int, str]  # row → why its grammar cannot go on
    edited: bool
    done: torch.cuda.Event | None
    edits: Sequence[RowEdits | None]  # of the time of the draw: a sequence that came back since has others
    entries: Sequence[Entry | None]
    grammars: Grammars
    samples: list[SeqSample] | None = None

    def __call__(self) -> list[SeqSample]:
        if self.samples is None:
            if self.done is not None:
                self.done.synchronize()
            self.samples = self._samples()
            for of, sample in zip(self.edits, self.samples, strict=True):
                if of is not None and sample.error is None:
                    of.follow(sample.token_id)
            self.grammars.follow(self.entries, self.samples)
        return self.samples

    def _samples(self) -> list[SeqSample]:
        ids, best = self.ids.tolist(), self.best.numpy()
        found: dict[int, TokenLogprobs] = {}
        if self.num_logprobs:
            rows = self.logprob_rows.tolist()
            entries = assemble(
                [ids[row] for row in rows], self.num_logprobs, *(part.tolist() for part in self.logprobs)
            )
            found = dict(zip(rows, entries, strict=True))
        samples = [SeqSample(token_id, found.get(row)) for row, token_id in enumerate(ids)]
        for row in np.flatnonzero(~np.isfinite(best)).tolist():
            forbidden = self.edited and np.isneginf(best[row])
            samples[row] = SeqSample(-1, error=ALL_FORBIDDEN if forbidden else NOT_FINITE)
        for row, error in self.errors.items():
            samples[row] = SeqSample(-1, error=error)
        return samples


class DeviceSampler:
    """Owns the sampling state of each sequence, as `Sampler` does on a CPU."""

    def __init__(self, vocab_size: int, grammars: Grammars, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._grammars = grammars
        self._batch = SamplerBatch(vocab_size)
        self._edits = DeviceEdits(vocab_size, device)
        self._facts = StepUpload(device, torch.int64)
        self._owed: dict[int, Draws] = {}  # by sequence that must know its last id: where that is

    def add(self, new_seq: NewSeq) -> None:
        """As `Sampler.add`."""
        self.remove(new_seq.seq_id)
        self._batch.add(new_seq)

    def remove(self, seq_id: int) -> None:
        """As `Sampler.remove`."""
        self._owed.pop(seq_id, None)
        if seq_id in self._batch:
            self._edits.forget(self._batch.edits_of([seq_id])[0])
            self._batch.remove(seq_id)

    def draw(self, logits: torch.Tensor, seq_ids: Sequence[int]) -> tuple[torch.Tensor, Draws]:
        """Draw the next token of each of ``seq_ids``: (int64 ids on the device, what waits for them).

        ``logits [len(seq_ids), vocab_size]`` fp32 are not changed.
        """
        slots = self._batch.slots(seq_ids)
        columns = self._batch.gather(slots)
        edits = self._batch.edits_of(seq_ids)
        entries = self._grammars.held(seq_ids)
        errors: dict[int, str] = {}
        is_edited = bool((columns["features"] & EDITED).any()) or any(entries)
        source, counted = logits, None
        if is_edited:
            masks = self._masks(seq_ids, edits, entries, errors)
            source, counted = self._edits.apply(logits, edits, masks)
        rows, wanted = logprobs_wanted(columns)
        facts, rows_there = self._facts.put([facts_of(columns), rows])
        drawn, best = sample_rows(source, facts, Purpose.DRAW, cut=truncated(columns))
        found: tuple[torch.Tensor, ...] = ()
        if wanted:
            of, of_ids = logits, drawn
            if len(wanted) < len(seq_ids):
                of, of_ids = logits.index_select(0, rows_there), drawn.index_select(0, rows_there)
            found = logprob_tensors(of, of_ids.clamp_min(0), min(max(wanted), self._vocab_size))
        draws = Draws(
            self._fetch(drawn), self._fetch(best), tuple(map(self._fetch, found)), rows, wanted, errors, is_edited,
            recorded_event() if self._device.type == "cuda" else None, edits, entries, self._grammars,
        )  # fmt: skip
        if counted is not None:
            self._edits.count(counted, drawn)
        self._batch.count(slots)
        for seq_id, of_row, entry in zip(seq_ids, edits, entries, strict=True):
            if entry is not None or (of_row is not None and of_row.reads_ids):
                self._owed[seq_id] = draws
        return drawn, draws

    def _masks(
        self, seq_ids: Sequence[int], edits: Sequence[RowEdits | None], entries: Sequence[Entry | None],
        errors: dict[int, str],
    ) -> dict[int, NDArray[np.int32]]:  # fmt: skip
        """Row → bits of the ids allowed, of rows that may not draw all; ``errors`` gets those that cannot go on."""
        for seq_id in seq_ids:
            owed = self._owed.pop(seq_id, None)
            if owed is not None:
                owed()
        masks: dict[int, NDArray[np.int32]] = {}
        for row, (of, entry) in enumerate(zip(edits, entries, strict=True)):
            bits = None if of is None else of.mask_bits(self._vocab_size)
            if entry is not None:
                entry.wait()
                if entry.error is not None:
                    errors[row] = entry.error
                    continue
                bits = entry.bits if bits is None else bits & entry.bits
            if bits is not None:
                masks[row] = bits
        return masks

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy to the host; there once an event behind it has come."""
        pinned = self._device.type == "cuda"
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        return host.copy_(tensor, non_blocking=True)
