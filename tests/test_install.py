"""Quire installs without a compiler, on torch, and says so; a wheel of its sdist serves, however it is installed.

The slow tests install into environments of their own: minutes, and 1 GB of disk for each while it runs. QUIRE_WHEEL
names a wheel to test instead of one that is built here.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import tomllib
import urllib.request
import venv
import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from quire.extras import DISTRIBUTION

ROOT = Path(__file__).resolve().parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CONSTRAINTS = str(ROOT / "constraints.txt")
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


@pytest.mark.parametrize("known", ["no compiler", "this one"])
def test_make_installs_again_once_there_is_a_compiler(tmp_path: Path, known: str) -> None:
    """A first install without a compiler has no kernels; one with the same compiler would have none again."""
    compiler = subprocess.run(
        "c++ --version 2>&1 | head -1", shell=True, capture_output=True, text=True
    ).stdout
    (tmp_path / "bin").mkdir()
    for name in ("bin/python", ".installed"):
        (tmp_path / name).touch()
    (tmp_path / ".no-kernels").write_text(compiler if known == "this one" else "c++: not found\n")
    plan = run(["make", "-n", "install", f"VENV={tmp_path}"], cwd=ROOT)
    assert ("tools/install.py" in plan) == (known == "no compiler")


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
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "__pycache__", "*.so"))
    script = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"
    name = run([sys.executable, "-c", script, folder], cwd=copy).split()[-1]
    shutil.rmtree(copy)
    return folder / name


def test_the_distribution_has_one_name() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"] == DISTRIBUTION


def test_the_sdist_has_no_results_of_benchmarks(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    with tarfile.open(make_sdist(tmp_path)) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"pyproject.toml", "csrc/bind.h", "src/quire/models/quill_data/quill/model.safetensors"} <= {
        *names
    }
    assert "benchmarks/README.md" in names
    assert not [name for name in names if name.startswith(("benchmarks/results", ".ci", ".git/"))]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of QUIRE_WHEEL, or one that is built from the source distribution, with the native kernels."""
    if "QUIRE_WHEEL" in os.environ:
        return Path(os.environ["QUIRE_WHEEL"]).resolve()
    pytest.importorskip("scikit_build_core")
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "pip", "wheel", *BUILD, "-w", folder, make_sdist(folder)], timeout=1500)
    (built,) = folder.glob("quire_llm-*.whl")
    return built


@pytest.fixture(scope="module")
def index() -> Iterator[str]:
    """An index with the CPU build of torch: where PIP_FIND_LINKS has it on this machine's disk, one of that."""
    links = Path(os.environ.get("PIP_FIND_LINKS", "/nowhere"))
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    builds = [file for file in links.glob("torch-*+cpu-*.whl") if f"-{python}-" in file.name]
    if not builds:
        yield CPU_INDEX
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "torch").mkdir()
        for file in builds:
            (Path(folder) / "torch" / file.name).symlink_to(file)
        handler = partial(Quiet, directory=folder)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()
            thread.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder without a line per request."""

    def log_message(self, *_: object) -> None:
        pass


def documented(tool: str, wheel: Path, index: str) -> list[str]:
    """Return the words of the line for ``tool`` in docs/first-hour.md, with this wheel and this index."""
    lines = (ROOT / "docs" / "first-hour.md").read_text().splitlines()
    (line,) = (line for line in lines if re.match(rf"{tool} .*quire_llm-\S+\.whl", line))
    assert CPU_INDEX in line
    return shlex.split(re.sub(r"\./quire_llm-\S+\.whl", str(wheel), line.replace(CPU_INDEX, index)))


def environment(folder: Path, *packages: str) -> Path:
    """Make an environment in ``folder`` with pip and ``packages``; return its folder of programs."""
    venv.create(folder, with_pip=True)
    if packages:
        run([folder / "bin" / "pip", "install", "-q", "--disable-pip-version-check", *packages], timeout=800)
    return folder / "bin"


def served(command: Sequence[str | Path], **env: str) -> str:
    """Serve Quill by ``command`` from another folder, ask it for a completion; return what the server printed."""
    options = ["--port", "0", "--kv-memory", "256MiB"]
    with subprocess.Popen(
        [*map(str, command), *options], cwd="/", stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, **NO_COMPILER, **env},
    ) as server:  # fmt: skip
        assert server.stderr is not None
        lines = []
        try:
            for line in server.stderr:
                lines.append(line)
                if line.startswith("stop "):  # the end of what a start says
                    break
            match = re.search(r"^ready .* on (http\S+)", "".join(lines), re.MULTILINE)
            assert match is not None, "".join(lines)
            body = {"prompt": "It was a dark and", "max_tokens": 8, "ignore_eos": True}
            request = urllib.request.Request(
                f"{match[1]}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            answer = json.load(urllib.request.urlopen(request, timeout=60))
        finally:
            os.killpg(server.pid, signal.SIGTERM)
    assert answer["determinism"] == "exact"
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["text"]
    return "".join(lines)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheel_of_the_sdist_is_native(wheel: Path, tmp_path: Path) -> None:
    assert "quire/py.typed" in zipfile.ZipFile(wheel).namelist()
    run([sys.executable, "-m", "pip", "install", *BUILD, "--target", tmp_path / "site", wheel])
    native, backends = probe(tmp_path / "site").split(" ", 1)
    assert native == "True"
    assert "scalar" in backends


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_pip_installs_a_wheel_that_serves(wheel: Path, index: str, tmp_path: Path) -> None:
    """No compiler, no source tree, nothing but what the wheel's metadata asks for; then an extra as errors name it."""
    programs = environment(tmp_path / "venv")
    env = NO_COMPILER | {"PIP_CONSTRAINT": CONSTRAINTS}
    run([programs / "pip", *documented("pip", wheel, index)[1:], "-q"], timeout=800, **env)
    imported = run([programs / "python", "-c", "import quire; print(quire.__file__)"])
    assert imported.startswith(str(tmp_path))
    assert "not built" not in served([programs / "quire", "serve", "quill"])
    run([programs / "pip", "install", "-q", f"{DISTRIBUTION}[zstd]"], timeout=200, **env)
    run([programs / "python", "-c", "import zstandard"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_uvx_serves_from_a_wheel(wheel: Path, index: str, tmp_path: Path) -> None:
    programs = environment(tmp_path / "uv", "uv")
    env = {"UV_CACHE_DIR": str(tmp_path / "cache"), "UV_PYTHON": sys.executable, "UV_CONSTRAINT": CONSTRAINTS}
    command = documented("uvx", wheel, index)
    assert command[-3:] == ["quire", "serve", "quill"]
    assert "not built" not in served([programs / command[0], *command[1:]], **env)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_pipx_installs_a_wheel_that_serves(index: str, tmp_path: Path) -> None:
    """The wheel is one that was built without a compiler: it serves as well, and says what is missing."""
    pytest.importorskip("scikit_build_core")
    build = ["-C", f"build-dir={tmp_path / 'build'}", "-w", tmp_path, ROOT]
    run([sys.executable, "-m", "pip", "wheel", *BUILD, *build], **NO_COMPILER)
    (wheel,) = tmp_path.glob("quire_llm-*.whl")
    programs = environment(tmp_path / "pipx", "pipx")
    homes = {"PIPX_HOME": str(tmp_path / "home"), "PIPX_BIN_DIR": str(tmp_path / "bin")}
    command = documented("pipx", wheel, index)
    run([programs / command[0], *command[1:]], timeout=800, PIP_CONSTRAINT=CONSTRAINTS, **homes)
    said = served([tmp_path / "bin" / "quire", "serve", "quill"])
    assert "not built" in said or "reference" in said
