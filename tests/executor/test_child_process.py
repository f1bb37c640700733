"""What processes of an engine start with, and lines of several of them on one terminal."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

import quire
from quire.executor.base import failed
from quire.executor.child_process import PrefixedStream, child_environment
from quire.step import StepPlan


@pytest.mark.parametrize(
    "pieces",
    [["one\ntwo\n"], list("one\ntwo\n"), ["on", "e\ntw", "o", "\n"], ["", "one\n", "", "two\n"]],
    ids=["whole", "by character", "in pieces", "with nothing between"],
)
def test_each_line_has_its_process_before_it(pieces: list[str]) -> None:
    stream = io.StringIO()
    prefixed = PrefixedStream(stream, "rank 1")
    for piece in pieces:
        prefixed.write(piece)
    assert stream.getvalue() == "[rank 1] one\n[rank 1] two\n"


def test_blank_lines_stay_blank() -> None:
    stream = io.StringIO()
    PrefixedStream(stream, "0").write("a\n\nb")
    assert stream.getvalue() == "[0] a\n\n[0] b"


def test_a_child_runs_the_package_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(Path(quire.__file__).parents[1])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert child_environment()["PYTHONPATH"] == here
    monkeypatch.setenv("PYTHONPATH", "/else")
    assert child_environment()["PYTHONPATH"] == f"{here}{os.pathsep}/else"


def test_a_step_that_raised_fails_with_its_text() -> None:
    result = failed(StepPlan(7), ValueError("no memory"))
    assert (result.step, result.error, result.seqs) == (7, "ValueError: no memory", ())
