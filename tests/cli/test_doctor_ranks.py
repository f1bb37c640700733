"""`quire doctor --tensor-parallel-size N`: where the ranks would run, and their shared memory."""

from __future__ import annotations

from typer.testing import CliRunner

from quire.cli import app


def test_doctor_says_where_each_rank_would_run() -> None:
    done = CliRunner().invoke(app, ["doctor", "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"])
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines()]
    assert [row[:2] for row in rows if row and row[0].isdigit()] == [
        ["0", "0"],
        ["1", "0"],
        ["2", "1"],
        ["3", "1"],
    ]
    assert "16.0 MiB needed" in done.output
