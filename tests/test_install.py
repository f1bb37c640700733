"""Quire installs without a compiler; it then runs on torch and says so. (`make` itself installs with one.)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PROBE = """
from quire.device import detect_device
from quire.kernels import registry
import quire.kernels.linear
print(detect_device().native, sorted(set(registry.backends("linear"))))
"""


def run(command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, cwd="/", env={**os.environ, **env}, timeout=280
    )


def test_install_without_a_compiler(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    # A build folder of its own: the one of the editable install holds a compiler that works.
    build = ["-C", f"build-dir={tmp_path / 'build'}", "--target", str(tmp_path / "site"), str(ROOT)]
    done = run([*pip, *build], CXX="/bin/false", CC="/bin/false")
    assert done.returncode == 0, done.stderr[-3000:]
    # -S leaves out site-packages' .pth files, and with them the editable install.
    paths = [str(tmp_path / "site"), *(p for p in sys.path if p.endswith("site-packages"))]
    probe = run([sys.executable, "-S", "-c", PROBE], PYTHONPATH=os.pathsep.join(paths))
    assert probe.returncode == 0, probe.stderr[-3000:]
    assert probe.stdout.strip() == "False ['reference']"
