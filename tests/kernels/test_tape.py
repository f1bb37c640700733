"""Native calls, recorded at the largest shape, run again at any smaller one with what then lies in the memory."""

import pytest
import torch

from quire.kernels.linear import linear, pack_empty, write_rows
from quire.kernels.pointwise import gated
from quire.kernels.registry import backends
from quire.kernels.tape import StepTape, between_segments

native = pytest.importorskip("quire._native", reason="the native extension is not built")
LEVEL = next((level for level in backends("gated") if level != "reference"), "reference")
LIMITS = {"tokens": 8, "logits": 4}


def test_a_replay_takes_its_step_s_rows_and_memory_as_it_is() -> None:
    packed = pack_empty(48, 64, torch.float32, bias=False, backend=LEVEL)
    write_rows(packed, 0, torch.randn(48, 64))
    x = torch.randn(8, 64)
    tape = native.Tape()
    tape.start(**LIMITS)
    y = linear(x, packed)
    few = linear(x[:4], packed)
    tape.stop()
    assert len(tape) == 2
    y.fill_(7.0)
    few.fill_(7.0)
    for tokens, logits in ((3, 1), (8, 4), (0, 0), (5, 4)):
        x.copy_(torch.randn(8, 64))
        before = y.clone(), few.clone()
        tape.run(2, tokens=tokens, logits=logits)
        want = linear(x, packed)
        for got, old, rows in ((y, before[0], tokens), (few, before[1], logits)):
            assert torch.equal(got[:rows], want[:rows])
            assert torch.equal(got[rows:], old[rows:]), "rows beyond the step's were written"


def test_recording_runs_nothing() -> None:
    x = torch.randn(8, 32)
    tape = native.Tape()
    tape.start(**LIMITS)
    y = gated.on(LEVEL)(x, "silu")
    tape.stop()
    y.fill_(7.0)
    assert torch.equal(y, torch.full_like(y, 7.0))
    tape.run(1, **LIMITS)
    assert torch.equal(y, gated.on(LEVEL)(x, "silu"))


def test_a_cut_runs_between_segments_and_only_when_it_has_to() -> None:
    x, needed = torch.randn(8, 32), [True]

    def forward() -> torch.Tensor:
        y = gated.on(LEVEL)(x, "silu")
        assert between_segments(lambda x, y: y.add_(x[:, :16]), x, y, lambda: needed[0])
        return y

    tape = StepTape(forward, 8, 4)
    plain = gated.on(LEVEL)(x, "silu")
    tape.run(5, 2)
    assert torch.equal(tape.output[:5], plain[:5] + x[:5, :16])
    needed[0] = False
    tape.run(5, 2)
    assert torch.equal(tape.output[:5], plain[:5])


def test_what_cannot_be_replayed_is_refused() -> None:
    tape = native.Tape()
    tape.start(**LIMITS)
    try:
        with pytest.raises(RuntimeError, match="over 5 rows cannot be replayed"):
            gated.on(LEVEL)(torch.randn(5, 32), "silu")
    finally:
        tape.stop()
    with pytest.raises(IndexError, match="larger than the step"):
        tape.run(1, tokens=9, logits=1)
    with pytest.raises(ValueError, match="different numbers"):
        tape.start(tokens=4, logits=4)


def test_tapes_do_not_nest() -> None:
    tape, other = native.Tape(), native.Tape()
    tape.start(**LIMITS)
    try:
        with pytest.raises(RuntimeError, match="recording on this thread already"):
            other.start(**LIMITS)
        with pytest.raises(RuntimeError, match="not recording"):
            other.stop()
    finally:
        tape.stop()
