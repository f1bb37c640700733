"""Quire installs without a compiler, on torch, and says so; from its sdist with one it is native; a wheel serves.

The slow tests install into environments of their own: minutes, and 800 MB of disk while they run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILD = ("-q", "--no-deps", "--no-build-isolation", "--no-index")
NO_COMPILER = {"CXX": "/bin/false", "CC": "/bin/false"}

PROBE = """
from quire.device import detect_device
from quire.kernels import registry
import quire.kernels.linear
print(detect_device().native, sorted(set(registry.backends("linear"))))
"""


def run(command: Sequence[str | Path], *, cwd: str | Path = "/", timeout: float = 280, **env: str) -> str:
    """Run, outside of the source tree unless ``cwd`` says otherwise; return the standard output."""
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **env},
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def probe(site: Path) -> str:
    """What an install in ``site`` computes with. -S leaves out .pth files, and with them the editable install."""
    paths = [str(site), *(path for path in sys.path if path.endswith("site-packages"))]
    return run([sys.executable, "-S", "-c", PROBE], PYTHONPATH=os.pathsep.join(paths)).strip()


def test_install_without_a_compiler(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    # A build folder of its own: the one of the editable install holds a compiler that works.
    target = ["-C", f"build-dir={tmp_path / 'build'}", "--target", tmp_path / "site"]
    run([sys.executable, "-m", "pip", "install", *BUILD, *target, ROOT], **NO_COMPILER)
    assert probe(tmp_path / "site") == "False ['reference']"


def make_sdist(folder: Path) -> Path:
    """Build the source distribution from a copy of what git tracks."""
    copy = folder / "tree"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "__pycache__", "results", "*.so")
    )
    script = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"
    name = run([sys.executable, "-c", script, folder], cwd=copy).split()[-1]
    shutil.rmtree(copy)
    return folder / name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_sdist_builds_natively(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    sdist = make_sdist(tmp_path)
    run([sys.executable, "-m", "pip", "install", *BUILD, "--target", tmp_path / "site", sdist], timeout=800)
    native, backends = probe(tmp_path / "site").split(" ", 1)
    assert native == "True"
    assert "scalar" in backends


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_wheel_serves_in_a_fresh_environment(tmp_path: Path) -> None:
    """No compiler, no source tree, nothing but what the wheel's metadata asks for."""
    pytest.importorskip("scikit_build_core")
    build = ["-C", f"build-dir={tmp_path / 'build'}", "-w", tmp_path, ROOT]
    run([sys.executable, "-m", "pip", "wheel", *BUILD, *build], **NO_COMPILER)
    (wheel,) = tmp_path.glob("quire-*.whl")
    assert "quire/py.typed" in zipfile.ZipFile(wheel).namelist()
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "-c",
        ROOT / "constraints.txt",
    ]
    run([*pip, "torch==2.13.0"], timeout=800, **NO_COMPILER)  # by itself: see the Makefile
    run([*pip, wheel], timeout=800, **NO_COMPILER)
    assert "False" not in run([python, "-c", "import quire; print('site-packages' in quire.__file__)"])
    command = [python.with_name("quire"), "serve", "quill", "--port", "0", "--kv-memory", "256MiB"]
    with subprocess.Popen(command, cwd="/", stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        said = []
        for line in server.stderr:
            said.append(line)
            if match := re.search(r"^ready .* on (http\S+)", line):
                break
        else:
            pytest.fail("".join(said))
        try:
            body = {"prompt": "It was a dark and", "max_tokens": 8, "ignore_eos": True}
            request = urllib.request.Request(
                f"{match[1]}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            answer = json.load(urllib.request.urlopen(request, timeout=60))
        finally:
            server.terminate()
    assert answer["determinism"] == "exact"
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["text"]
    assert "not built" in "".join(said) or "reference" in "".join(said), (
        "start-up says that kernels are missing"
    )
