"""`DeviceSampler`: the sampling of a GPU's steps, launched behind the forward and not waited for.

What the host must know of a sequence before its next token can be sampled decides what waits:

    temperature, top_k, top_p, min_p, logprobs           nothing: `kernels.sampling.triton`
    bias, penalties, allowed_token_ids, min_tokens       nothing: the GPU counts, and masks depend on the number alone
    grammars, thinking_budget, repeat_last_n,
    bad_words of several ids                             its last id: the step before is waited for, while the GPU
                                                         computes the forward that was launched first
    typical_p                                            its logits
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.sampling import EDITED
from quire.kernels.sampling.logprobs import assemble, logprob_tensors
from quire.kernels.sampling.triton import CHUNK, edit_rows, facts_of, logprobs_wanted, sample_rows, truncated
from quire.request import TokenLogprobs
from quire.runner.device_batch import StepUpload, recorded_event
from quire.runner.sequences import WorkerSeq
from quire.sampling.grammars import Grammars, GrammarState
from quire.sampling.processors import LogitsProcessors, Penalties
from quire.sampling.sampler import ALL_FORBIDDEN, NOT_FINITE, TOKEN_NOISE, Columns, SeqSample
from quire.text.grammar_matcher import bitmask_words

LEAST_ROWS = 8  # rows in the table of counts

Ints = NDArray[np.int64]
# Rows whose tokens are counted, and the row of the table that each has.
Counted = tuple[Tensor, Tensor]


@dataclass(slots=True)
class PendingSamples:
    """A step's tokens on their way to the host; a call waits for them, and has them from then on."""

    ids: Tensor
    best: Tensor  # the largest logits, not finite where a row failed
    logprobs: tuple[Tensor, ...]
    logprob_rows: Ints
    num_logprobs: list[int]
    errors: dict[int, str]  # row → why its grammar cannot go on
    edited: bool
    done: torch.cuda.Event | None
    # Of the time of the launch: a sequence that came back since has others.
    processors: Sequence[LogitsProcessors | None]
    states: Sequence[GrammarState | None]
    grammars: Grammars
    samples: list[SeqSample] | None = None

    def __call__(self) -> list[SeqSample]:
        if self.samples is None:
            if self.done is not None:
                self.done.synchronize()
            self.samples = self._samples()
            followed: list[tuple[GrammarState, int]] = []
            for processors, state, sample in zip(self.processors, self.states, self.samples, strict=True):
                if sample.error is None and processors is not None:
                    processors.follow(sample.token_ids[0])
                if sample.error is None and state is not None:
                    followed.append((state, sample.token_ids[0]))
            self.grammars.follow(followed)
        return self.samples

    def _samples(self) -> list[SeqSample]:
        ids, best = self.ids.tolist(), self.best.numpy()
        logprobs: dict[int, TokenLogprobs] = {}
        if self.num_logprobs:
            rows = self.logprob_rows.tolist()
            entries = assemble(
                [ids[row] for row in rows], self.num_logprobs, *(part.tolist() for part in self.logprobs)
            )
            logprobs = dict(zip(rows, entries, strict=True))
        samples = [
            SeqSample((token_id,), (logprobs[row],) if row in logprobs else None)
            for row, token_id in enumerate(ids)
        ]
        for row in np.flatnonzero(~np.isfinite(best)).tolist():
            forbidden = self.edited and np.isneginf(best[row])
            error = ALL_FORBIDDEN if forbidden else NOT_FINITE
            samples[row] = SeqSample((), error=error, of_request=bool(forbidden), recompute=not forbidden)
        for row, error in self.errors.items():
            state = self.states[row]
            recompute = state is not None and state.is_bystander
            samples[row] = SeqSample((), error=error, of_request=True, recompute=recompute)
        return samples


class DeviceSampler:
    """Samples one token per sequence; drafts are not verified here."""

    def __init__(self, vocab_size: int, grammars: Grammars, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._grammars = grammars
        self._processors = DeviceProcessors(vocab_size, device)
        self._facts = StepUpload(device, torch.int64)

    def sample(
        self, logits: Tensor, seqs: Sequence[WorkerSeq], columns: Columns
    ) -> tuple[Tensor, PendingSamples]:
        """Sample the next token of each of ``seqs``: (int64 ids on the device, the pending result).

        ``logits [len(seqs), vocab_size]`` fp32 are not changed.
        """
        assert len(seqs) == columns.size, "a GPU samples one token per sequence"
        processors = [seq.processors for seq in seqs]
        states = [seq.grammar for seq in seqs]
        errors: dict[int, str] = {}
        is_edited = bool((columns["features"] & EDITED).any()) or any(states)
        source, counted = logits, None
        if is_edited:
            masks = self._masks(seqs, errors)
            source, counted = self._processors.apply(logits, processors, masks)
        rows, wanted = logprobs_wanted(columns)
        facts, rows_there = self._facts.put([facts_of(columns), rows])
        ids, best = sample_rows(source, facts, TOKEN_NOISE, cut=truncated(columns))
        parts: tuple[Tensor, ...] = ()
        if wanted:
            rows_of_logits, of_ids = logits, ids
            if len(wanted) < len(seqs):
                rows_of_logits, of_ids = logits.index_select(0, rows_there), ids.index_select(0, rows_there)
            parts = logprob_tensors(rows_of_logits, of_ids.clamp_min(0), min(max(wanted), self._vocab_size))
        pending = PendingSamples(
            self._fetch(ids), self._fetch(best), tuple(map(self._fetch, parts)), rows, wanted, errors, is_edited,
            recorded_event() if self._device.type == "cuda" else None, processors, states, self._grammars,
        )  # fmt: skip
        if counted is not None:
            self._processors.count(counted, ids)
        for seq in seqs:
            if seq.processors is not None:
                seq.processors.count()
            if seq.grammar is not None or (seq.processors is not None and seq.processors.reads_ids):
                seq.pending = pending
        return ids, pending

    def _masks(self, seqs: Sequence[WorkerSeq], errors: dict[int, str]) -> dict[int, NDArray[np.int32]]:
        """Row → bits of the ids allowed, of rows where some are not; ``errors`` gets those that cannot go on."""
        for seq in seqs:
            if seq.pending is not None:
                seq.pending()
                seq.pending = None
        masks: dict[int, NDArray[np.int32]] = {}
        for row, seq in enumerate(seqs):
            mask = None if seq.processors is None else seq.processors.mask
            bits = None if mask is None else mask.bits()
            if seq.grammar is not None:
                seq.grammar.wait()
                if seq.grammar.error is not None:
                    errors[row] = seq.grammar.error
                    continue
                allowed = seq.grammar.masks[-1].bits
                bits = allowed if bits is None else bits & allowed
            if bits is not None:
                masks[row] = bits
        return masks

    def _fetch(self, tensor: Tensor) -> Tensor:
        """Begin to copy to the host; there once an event behind it has come."""
        pinned = self._device.type == "cuda"
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        return host.copy_(tensor, non_blocking=True)


class DeviceProcessors:
    """The logits processors on a GPU, where nothing waits for the host.

    How often a sequence sampled each id is counted there as it is sampled, so a step does not need the ids of the one
    before on the host. The table has a row of int32 ``[vocab_size]`` for each sequence with penalties, and doubles.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._counts = torch.empty(0, vocab_size, dtype=torch.int32, device=device)
        self._nothing = torch.zeros(1, dtype=torch.int32, device=device)  # has the type of both tables
        # [1, 8] each, as `edit_rows` reads them, with the number of biases last. An admission makes new processors.
        self._facts_of: dict[LogitsProcessors | None, Ints] = {}
        self._free: list[int] = []
        self._upload = StepUpload(device, torch.int64)
        self._masks = StepUpload(device, torch.int32)

    def release(self, processors: LogitsProcessors) -> None:
        """A sequence goes. Steps in flight may count for it: its row of the table is cleared for the next one."""
        row = int(self._facts_of.pop(processors, _NO_FACTS)[0, 0])
        if row >= 0:
            self._free.append(row)

    def apply(
        self, logits: Tensor, of_rows: Sequence[LogitsProcessors | None], masks: Mapping[int, NDArray[np.int32]]
    ) -> tuple[Tensor, Counted]:  # fmt: skip
        """Return a changed copy of ``logits [rows, vocab_size]``, and what `count` is to be told with the ids sampled.

        ``masks``: row → bits of the ids allowed, `bitmask_words` of them.
        """
        fresh = self._note(of_rows)
        facts = np.concatenate([self._facts_of.get(processors, _NO_FACTS) for processors in of_rows])
        facts[list(masks), 1] = np.arange(len(masks))
        facts[:, 6] = np.cumsum(facts[:, 7])
        facts[:, 5] = facts[:, 6] - facts[:, 7]
        biases = [
            processors.bias
            for processors in of_rows
            if processors is not None and processors.bias is not None
        ]
        rows = np.flatnonzero(facts[:, 0] >= 0)
        known: list[Ints] = []
        for _, penalties in fresh:
            output = penalties.output
            known += [penalties.seen.ids, output.ids, output.counts.astype(np.int64)]
        arrays = [
            facts,
            np.concatenate([np.empty(0, np.int64), *(bias.ids for bias in biases)]),
            np.concatenate([np.empty(0), *(bias.biases for bias in biases)], dtype=np.float64).view(np.int64),
            rows,
            facts[rows, 0],
        ]
        try:
            views = self._upload.put([*arrays, *known])
        except torch.OutOfMemoryError:
            for processors, _ in fresh:  # their rows of the table hold what was there before
                self.release(processors)
            raise
        facts_there, ids_there, biases_there, rows_there, of_there, *known_there = views
        for index, (processors, _) in enumerate(fresh):
            seen, output_there, counts = known_there[3 * index : 3 * index + 3]
            row = self._counts[int(self._facts_of[processors][0, 0])].zero_().index_fill_(0, seen, 1)
            row.index_add_(0, output_there, 2 * counts.to(torch.int32))
        words = bitmask_words(self._vocab_size)
        bits = self._masks.put([np.stack(list(masks.values()))])[0] if masks else self._nothing
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        edit_rows[(len(of_rows), triton.cdiv(self._vocab_size, CHUNK))](
            logits, logits.stride(0), out, facts_there, self._counts if len(rows) else self._nothing, bits, ids_there,
            biases_there, self._vocab_size, words, CHUNK=CHUNK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        for at, of_row in enumerate(of_rows):
            for processor in of_row or ():
                if not processor.fused:
                    processor.apply(out[at])
        return out, (rows_there, of_there)

    def count(self, counted: Counted, ids: Tensor) -> None:
        """Count the tokens sampled, ``ids [rows]`` int64."""
        places = counted[1] * self._vocab_size + ids.index_select(0, counted[0])
        twos = torch.full(places.shape, 2, dtype=torch.int32, device=self._device)
        self._counts.view(-1).index_add_(0, places, twos)

    def _note(self, of_rows: Sequence[LogitsProcessors | None]) -> list[tuple[LogitsProcessors, Penalties]]:
        """Note the facts of those that are new; return those of them that got a row of the table, to be cleared."""
        new = [
            processors for processors in of_rows
            if processors is not None and (processors.penalties or processors.bias) and processors not in self._facts_of
        ]  # fmt: skip
        fresh = [(processors, processors.penalties) for processors in new if processors.penalties is not None]
        size = len(self._counts)
        if len(fresh) > len(self._free):
            larger = max(2 * size, size + len(fresh), LEAST_ROWS)
            counts = torch.empty(larger, self._vocab_size, dtype=torch.int32, device=self._device)
            counts[:size] = self._counts
            self._counts = counts
            self._free.extend(range(size, larger))
        for processors in new:
            facts = self._facts_of[processors] = _NO_FACTS.copy()
            processors.on_end = self.release
            if processors.bias is not None:
                facts[0, 7] = len(processors.bias.ids)
            if processors.penalties is not None:
                penalties = processors.penalties
                numbers = (penalties.repetition, penalties.frequency, penalties.presence)
                facts[0, 0] = self._free.pop()
                facts[0, 2:5] = np.array(numbers, np.float64).view(np.int64)
        return fresh


_NO_FACTS = np.array([[-1, -1, 0, 0, 0, 0, 0, 0]], np.int64)
