"""Recorded native calls run again with the memory that they were made with."""

import pytest
import torch

from quire.kernels.linear import linear, pack_empty, write_rows

native = pytest.importorskip("quire._native", reason="the native extension is not built")


def test_a_replay_computes_with_what_now_lies_in_the_memory() -> None:
    level = native.best_isa()
    packed = pack_empty(48, 64, torch.float32, bias=False, backend=level)
    write_rows(packed, 0, torch.randn(48, 64))
    x = torch.randn(3, 64)
    tape = native.Tape()
    tape.start()
    y = linear(x, packed)
    tape.stop()
    assert len(tape) == 1
    x.copy_(torch.randn(3, 64))
    tape.run(2)
    assert torch.equal(y, linear(x, packed))


def test_tapes_do_not_nest() -> None:
    tape, other = native.Tape(), native.Tape()
    tape.start()
    try:
        with pytest.raises(RuntimeError, match="recording on this thread already"):
            other.start()
        with pytest.raises(RuntimeError, match="not recording"):
            other.stop()
    finally:
        tape.stop()
