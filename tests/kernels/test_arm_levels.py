"""A kernel cross-compiled for Arm holds the instructions of its level (`make test-arm` runs all of them under qemu)."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("aarch64-linux-gnu-g++")


def flags_of(level: str) -> list[str]:
    """The compiler flags of a level, as CMakeLists.txt has them."""
    text = (ROOT / "CMakeLists.txt").read_text()
    found = re.search(rf"add_level\({level} SOURCES \S+\s+FLAGS ([^)]+)\)", text)
    assert found is not None
    return found.group(1).split()


@pytest.mark.skipif(COMPILER is None, reason="aarch64-linux-gnu-g++ is not installed (make services)")
def test_an_arm_level_has_its_instructions() -> None:
    assert COMPILER is not None
    command = [COMPILER, "-std=c++20", "-O2", "-S", "-o-", "-DQUIRE_ISA=neon_i8mm", "-I", str(ROOT / "csrc")]
    source = ROOT / "csrc" / "cpu" / "lora_kernel.cpp"
    done = subprocess.run(
        [*command, *flags_of("neon_i8mm"), str(source)], capture_output=True, text=True, check=True
    )
    assert re.search(r"\bbfdot\b", done.stdout)
    assert re.search(r"\bfmla\b", done.stdout)
