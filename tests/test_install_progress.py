"""What `make install` tells of an install: downloads, objects compiled, the time left, and the end of a failure."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from tools.install import Progress, Steps, main, run

pytestmark = pytest.mark.system

LINES = """\
Looking in indexes: https://pypi.org/simple
  Downloading torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl (191.8 MB)
  Installing build dependencies: started
  Building editable for quire (pyproject.toml): started
  [1/105] Building CXX object CMakeFiles/_native.dir/csrc/bind_linear.cpp.o
  [21/105] Building CXX object CMakeFiles/kernels_amx.dir/csrc/cpu/linear.cpp.o
  [105/105] Linking CXX shared module _native.cpython-311-x86_64-linux-gnu.so
Installing collected packages: mpmath, torch
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def told(out: io.StringIO) -> list[str]:
    """Read `LINES`, one every six seconds."""
    times = [0.0]
    steps = Steps(Progress(out, lambda: times[0]), lambda: times[0], io.StringIO())
    for line in LINES.splitlines():
        steps.read(line)
        times[0] += 6.0
    return out.getvalue().splitlines()


def test_each_part_of_an_install_is_told_with_the_time_since_its_start() -> None:
    assert told(io.StringIO()) == [
        " 0:06  download  1: torch (191.8 MB)",
        " 0:12  fetching what the build needs",
        " 0:18  configuring the build of the kernels",
        " 0:24  compile   1 of 105",
        " 0:30  compile   21 of 105, about 1 min left",
        " 0:36  compile   105 of 105",
        " 0:42  unpacking what was downloaded",
    ]


def test_a_terminal_has_one_line_that_changes() -> None:
    out = Terminal()
    told(out)
    assert out.getvalue().count("\n") == 1  # behind the last object
    assert out.getvalue().endswith("\r\x1b[K 0:42  unpacking what was downloaded")


def test_a_failure_shows_the_end_of_pips_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\necho No matching distribution found for no-such-package-of-quire\nexit 1\n")
    python.chmod(0o755)
    log = tmp_path / "install.log"
    assert main([str(tmp_path), str(log), "--", "--no-index", "no-such-package-of-quire"]) != 0
    said = capfd.readouterr()
    assert said.out.startswith(f"installing into {tmp_path}: downloads about")
    assert "no-such-package-of-quire" in said.err
    assert f"its whole output is in {log}" in said.err


def test_output_is_read_as_it_comes_and_kept() -> None:
    log = io.StringIO()
    steps = Steps(Progress(io.StringIO(), lambda: 0.0), lambda: 0.0, log)
    assert run([sys.executable, "-c", "print('[7/9] Building')"], steps) == (0, "[7/9] Building\n")
    assert steps.num_objects == 7
    assert log.getvalue() == "[7/9] Building\n"


def test_another_step_is_told_at_once() -> None:
    out = io.StringIO()
    steps = Steps(Progress(out, lambda: 1.0), lambda: 1.0, io.StringIO())
    for line in LINES.splitlines()[1:4]:
        steps.read(line)
    assert [line.split("  ", 1)[1] for line in out.getvalue().splitlines()] == [
        "download  1: torch (191.8 MB)", "fetching what the build needs", "configuring the build of the kernels",
    ]  # fmt: skip
