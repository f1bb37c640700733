"""What was seen and sampled, by sequence and position: the digest of the raw logits' bits, and the sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from quire.request import TokenLogprobs
from quire.runner import model_runner
from quire.runner.sequences import WorkerSeq, WorkerSeqs
from quire.sampling.sampler import SeqSample
from quire.step import NewSeq


class Key(NamedTuple):
    """Names one sampled token in every run: seeds are distinct among the requests."""

    seed: int
    sample_index: int
    position: int


class Draw(NamedTuple):
    logits_digest: bytes
    token_id: int
    logprobs: TokenLogprobs | None = None


class Recorder:
    """Tokens of one run. One that is sampled twice (after a preemption, say) must be the same twice."""

    def __init__(self) -> None:
        self.draws: dict[Key, Draw] = {}
        self.conflicts: list[Key] = []
        self._seeds: dict[int, tuple[int, int]] = {}  # by sequence

    def on_admit(self, new: NewSeq) -> None:
        assert new.sampling.seed is not None
        self._seeds[new.seq_id] = (new.sampling.seed, new.sample_index)

    def on_verify(
        self, logits: Tensor, columns: Any, rows: list[list[int]], samples: list[SeqSample]
    ) -> None:
        """``rows``: of logits, those that the tokens of each sequence were sampled from."""
        for own, sample in zip(rows, samples, strict=True):
            assert sample.error is None, sample.error
            logprobs = sample.logprobs or (None,) * len(sample.token_ids)
            for row, token_id, entry in zip(own, sample.token_ids, logprobs, strict=True):
                column = columns[row]
                key = Key(int(column["seed"]), int(column["sample_index"]), int(column["position"]))
                self._note(key, logits[row], token_id, entry)

    def on_device(self, seq_id: int, position: int, row: Tensor) -> None:
        """Raw logits whose token stays on the device: what was sampled is seen in the events."""
        self._note(Key(*self._seeds[seq_id], position + 1), row, -1, None)

    def _note(self, key: Key, row: Tensor, token_id: int, logprobs: TokenLogprobs | None) -> None:
        draw = Draw(blake2b(row.numpy().tobytes(), digest_size=16).digest(), token_id, logprobs)
        if self.draws.setdefault(key, draw) != draw:
            self.conflicts.append(key)


@contextmanager
def recording(*, device: bool = False) -> Iterator[Recorder]:
    """Record every `ModelRunner` that works inside the block; ``device``: every `DeviceRunner`."""
    recorder = Recorder()
    admit, sample = WorkerSeqs.admit, model_runner.sample

    def recording_admit(self: WorkerSeqs, new: NewSeq) -> WorkerSeq:
        recorder.on_admit(new)
        return admit(self, new)

    def recording_sample(logits: Tensor, seqs: Any, columns: Any, *more: Any) -> list[SeqSample]:
        firsts = list(accumulate((seq.num_logits for seq in seqs), initial=0))
        with_drafts = [seq.num_logits > 1 for seq in seqs]
        samples = sample(logits, seqs, columns, *more)
        rows = [
            [
                first,
                *(first + 1 + node for node in (seq.drafting.accepted if drafts and seq.drafting else ())),
            ]
            for first, seq, drafts in zip(firsts, seqs, with_drafts, strict=False)
        ]
        recorder.on_verify(logits, columns, rows, samples)
        return samples

    with pytest.MonkeyPatch.context() as patch:
        if device:
            from quire.runner.device_runner import DeviceRunner

            patch.setattr(WorkerSeqs, "admit", recording_admit)
            patch.setattr(
                DeviceRunner,
                "observe_logits",
                property(lambda _: recorder.on_device, lambda *_: None),
                raising=False,
            )
        else:
            patch.setattr(model_runner, "sample", recording_sample)
        yield recorder
