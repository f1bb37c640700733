"""Sampling on a GPU against that of a CPU: penalties and masks with two steps in flight, and what waits for what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.kernels.triton.device import DEVICE, WARNINGS
from tests.sampling.harness import Sampler, columns, worker_seqs
from tests.sampling.test_grammars import DIGITS, EOS, PATH

from quire.request import SamplingParams, ThinkingBudget
from quire.runner.device_sampler import DeviceSampler, PendingSamples
from quire.sampling.grammars import Grammars
from quire.sampling.sampler import SeqSample
from quire.step import NewSeq

pytestmark = [WARNINGS, pytest.mark.gpu if DEVICE.type == "cuda" else pytest.mark.triton_interpret]
VOCAB = 131
SEED = 20261122
BASE = SamplingParams(temperature=0.9, seed=1, max_tokens=64)
FREE = (  # none of these needs to know on the host what it drew
    BASE,
    replace(BASE, presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.3),
    replace(BASE, temperature=0.0, frequency_penalty=1.1),
    replace(BASE, repetition_penalty=0.8, logit_bias={3: 4.0, 130: -2.5, 7: 1.25}),
    replace(BASE, allowed_token_ids=(1, 2, 64, 130), presence_penalty=2.0, logprobs=2),
    replace(BASE, min_tokens=3, stop_token_ids=(5,), eos_token_ids=(6,), logit_bias={5: 50.0}),
    replace(BASE, bad_words_token_ids=((9,), (10,)), logit_bias={9: 50.0}, top_k=7),
    replace(BASE, typical_p=0.5, frequency_penalty=0.4, logprobs=0),
)
GUIDED = (  # and each of these does
    replace(BASE, bad_words_token_ids=((4, 4),), logit_bias={4: 50.0}),
    replace(BASE, thinking_budget=ThinkingBudget(2, 8, 9, is_open=True), presence_penalty=1.0),
)


def seqs(kinds: tuple[SamplingParams, ...], grammar: str | None = None) -> list[NewSeq]:
    return [
        NewSeq(i, 0, (1, 2, 1, 40 + i), (2, 2, 90)[: i % 4], replace(kind, seed=i), 0, grammar=grammar)
        for i, kind in enumerate(kinds)
    ]


def logits_of(step: int, rows: int, vocab: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(SEED + step)
    return torch.randn(rows, vocab, generator=rng) * 2


def expected(new: list[NewSeq], steps: int, vocab: int = VOCAB, path: str = "") -> list[list[SeqSample]]:
    sampler = Sampler(vocab, grammars=Grammars(path, vocab, 1))
    for each in new:
        sampler.add(each)
    ids = [each.seq_id for each in new]
    return [sampler.sample(logits_of(step, len(new), vocab), ids) for step in range(steps)]


class OnDevice:
    """As `Sampler`, on the device: a step is launched, and its result comes when it is asked for."""

    def __init__(self, vocab: int, path: str = "") -> None:
        grammars = Grammars(path, vocab, 1)
        self.table = worker_seqs(vocab, grammars)
        self.sampler = DeviceSampler(vocab, grammars, DEVICE)

    def add(self, new: NewSeq) -> None:
        assert self.table.admit(new).refusal is None

    def sample(self, logits: torch.Tensor, seq_ids: Sequence[int]) -> PendingSamples:
        seqs = [seq for seq_id in seq_ids if (seq := self.table.find(seq_id)) is not None]
        _, pending = self.sampler.sample(logits.to(DEVICE), seqs, columns(self.table, seqs))
        self.table.expect(np.array([seq.row for seq in seqs]))
        return pending


def drawn(
    new: list[NewSeq], steps: int, in_flight: int, vocab: int = VOCAB, path: str = ""
) -> tuple[list[list[SeqSample]], list[bool]]:
    """What each step sampled, and whether it was waited for before the engine asked."""
    sampler = OnDevice(vocab, path)
    for each in new:
        sampler.add(each)
    out: list[PendingSamples] = []
    found, waited = [], []
    for step in range(steps):
        out.append(sampler.sample(logits_of(step, len(new), vocab), [each.seq_id for each in new]))
        if len(out) == in_flight:
            waited.append(out[0].samples is not None)
            found.append(out.pop(0)())
    return [*found, *(pending() for pending in out)], waited


def plain(samples: list[list[SeqSample]]) -> list[list[tuple[object, ...]]]:
    """Ids, errors, and of logprobs what is exact."""
    return [
        [
            (
                s.token_ids,
                s.error,
                s.logprobs and [(each.rank, each.top_token_ids, each.logprob) for each in s.logprobs],
            )
            for s in step
        ]
        for step in samples
    ]


@pytest.mark.parametrize(
    ("kinds", "waits", "in_flight", "steps"),
    [
        ((FREE[1], *FREE[3:6], *GUIDED), True, 2, 4),
        *(
            pytest.param(kinds, waits, in_flight, 7, marks=pytest.mark.slow)
            for kinds, waits in ((FREE, False), (GUIDED, True), ((*FREE, *GUIDED), True))
            for in_flight in (1, 2)
        ),
    ],
)
def test_tokens_are_those_of_the_host(
    kinds: tuple[SamplingParams, ...], waits: bool, in_flight: int, steps: int
) -> None:
    new = seqs(kinds)
    found, waited = drawn(new, steps, in_flight)
    assert plain(found) == plain(expected(new, steps)), f"seed {SEED}"
    assert waited == [waits and in_flight == 2] * (steps + 1 - in_flight)


def test_a_sequence_that_comes_back_is_built_from_its_ids() -> None:
    """Preempted with a step in flight: its state is that of the ids it comes back with, in a row used before."""
    kind = replace(BASE, presence_penalty=0.5, frequency_penalty=0.8, bad_words_token_ids=((4, 4),))
    (new,) = seqs((kind,))
    first, second = expected([new], 2)
    sampler = OnDevice(VOCAB)
    sampler.add(new)
    out = sampler.sample(logits_of(0, 1, VOCAB), [0])
    sampler.sample(logits_of(9, 1, VOCAB), [0])  # of the epoch before: its token is dropped
    sampler.add(replace(new, epoch=1, output_token_ids=first[0].token_ids))
    assert out() == first
    assert sampler.sample(logits_of(1, 1, VOCAB), [0])() == second


def test_grammars_and_rows_that_fail() -> None:
    """Masks in bits; a row whose ids are all forbidden and one that holds a NaN fail alone."""
    vocab = 4096
    new = [
        *seqs((replace(BASE, eos_token_ids=(EOS,)),) * 2, DIGITS),
        NewSeq(2, 0, (1,), (), replace(BASE, seed=2, presence_penalty=1.0), 0),
    ]
    new[1] = replace(new[1], output_token_ids=())
    new[0] = replace(new[0], sampling=replace(new[0].sampling, bad_words_token_ids=((9,), (8, 8))))
    assert plain(drawn(new, 2, 2, vocab, PATH)[0]) == plain(expected(new, 2, vocab, PATH))
    broken = [
        replace(new[2], sampling=replace(BASE, seed=3, allowed_token_ids=(3,), bad_words_token_ids=((3,),)))
    ]
    (found,) = drawn(broken, 1, 1)[0]
    assert found == expected(broken, 1)[0]
    assert found[0].error is not None
    sampler = OnDevice(VOCAB)
    for each in seqs(FREE[:2]):
        sampler.add(each)
    logits = logits_of(0, 2, VOCAB)
    logits[1, 5] = torch.nan
    failed = sampler.sample(logits, [0, 1])()
    assert [sample.error is None for sample in failed] == [True, False]
