"""What the sampler saw and drew, by sequence and position: the digest of the raw logits' bits, and the sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from quire.sampling import Sampler, SeqSample
from quire.step import NewSeq


class Key(NamedTuple):
    """Names one draw in every run: seeds are distinct among the requests."""

    seed: int
    sample_index: int
    position: int


class Draw(NamedTuple):
    logits_digest: bytes
    sample: SeqSample


class Recorder:
    """Draws of one run. A draw that happens twice (after a preemption, say) must be the same twice."""

    def __init__(self) -> None:
        self.draws: dict[Key, Draw] = {}
        self.conflicts: list[Key] = []
        self._next_key: dict[int, Key] = {}

    def on_add(self, seq: NewSeq) -> None:
        assert seq.sampling.seed is not None
        position = len(seq.prompt_token_ids) + len(seq.output_token_ids)
        self._next_key[seq.seq_id] = Key(seq.sampling.seed, seq.sample_index, position)

    def on_sample(self, logits: Tensor, seq_ids: Sequence[int], samples: Sequence[SeqSample]) -> None:
        for row, (seq_id, sample) in enumerate(zip(seq_ids, samples, strict=True)):
            key = self._next_key[seq_id]
            draw = Draw(blake2b(logits[row].numpy().tobytes(), digest_size=16).digest(), sample)
            if self.draws.setdefault(key, draw) != draw:
                self.conflicts.append(key)
            self._next_key[seq_id] = key._replace(position=key.position + 1)

    def on_device(self, seq_id: int, position: int, row: Tensor) -> None:
        """Raw logits whose draw stays on the device: what was drawn is seen in the events."""
        key = self._next_key[seq_id]._replace(position=position + 1)
        draw = Draw(blake2b(row.numpy().tobytes(), digest_size=16).digest(), SeqSample(-1))
        if self.draws.setdefault(key, draw) != draw:
            self.conflicts.append(key)


@contextmanager
def recording(*, device: bool = False) -> Iterator[Recorder]:
    """Record every `Sampler` that works inside the block; ``device``: every `DeviceRunner`."""
    recorder = Recorder()
    sample = Sampler.sample

    def watched(add: Callable[[Any, NewSeq], None]) -> Callable[[Any, NewSeq], None]:
        def recording_add(self: Any, new_seq: NewSeq) -> None:
            recorder.on_add(new_seq)
            add(self, new_seq)

        return recording_add

    def recording_sample(self: Sampler, logits: Tensor, seq_ids: Sequence[int]) -> list[SeqSample]:
        samples = sample(self, logits, seq_ids)
        recorder.on_sample(logits, seq_ids, samples)
        return samples

    with pytest.MonkeyPatch.context() as patch:
        if device:
            from quire.runner.device_runner import DeviceRunner
            from quire.runner.device_sampler import DeviceSampler

            patch.setattr(DeviceSampler, "add", watched(DeviceSampler.add))
            patch.setattr(
                DeviceRunner,
                "observe_logits",
                property(lambda _: recorder.on_device, lambda *_: None),
                raising=False,
            )
        else:
            patch.setattr(Sampler, "add", watched(Sampler.add))
            patch.setattr(Sampler, "sample", recording_sample)
        yield recorder
