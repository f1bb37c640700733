"""Build the native library with a fault planted in csrc, in a copy of the sources, compiling only what changed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from mutant import Mutant

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("csrc", "CMakeLists.txt")


class BuildError(Exception):
    """The library did not build."""


def missing_tools() -> list[str]:
    """Return what a build needs and this machine lacks."""
    lacking = [] if shutil.which(os.environ.get("CXX", "c++")) else ["a C++ compiler (c++)"]
    lacking += [] if shutil.which("cmake") else ["cmake"]
    if not shutil.which("ninja") and not shutil.which("make"):
        lacking.append("ninja or make")
    if importlib.util.find_spec("nanobind") is None:
        lacking.append("nanobind (make dev installs it)")
    return lacking


class NativeTree:
    """A copy of csrc with its build folder. Threads take turns: a build uses every core by itself.

    ``plain`` is the library of csrc as it is; ``tiles`` is that of mutants of the amx level: with emulated tiles if
    ``emulate``, else the same. A mutant's build begins with the objects of one of them and leaves them in place, so it
    compiles what includes the spoiled file and nothing else, with ccache or without.
    """

    def __init__(self, folder: Path, *, emulate: bool) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        for name in SOURCES:
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            copy(source, folder / name)
        self._run(
            "cmake", "-S", ".", "-B", "build", "-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}",
            *(["-G", "Ninja"] if shutil.which("ninja") else []),
            *(["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []),
        )  # fmt: skip
        self.plain = self.tiles = self._build("plain")
        self._objects = self._tile_objects = self._keep_objects("objects")
        if emulate:
            shutil.copytree(self._objects, folder / "build", symlinks=True)
            self._run("cmake", "-DQUIRE_EMULATED_TILES=ON", "build")
            self.tiles = self._build("tiles")
            self._tile_objects = self._keep_objects("objects-tiles")

    def library(self, mutant: Mutant) -> Path:
        """Return the library with the fault in it."""
        path, build = self.folder / mutant.file, self.folder / "build"
        with self._lock:
            original, times = path.read_text(), path.stat()
            objects = self._tile_objects if mutant.is_on_tiles else self._objects
            # Links and times as they are: a source that looks newer than its object would be compiled again.
            shutil.copytree(objects, build, symlinks=True)
            try:
                path.write_text(original.replace(mutant.old, mutant.new))
                return self._build(mutant.name)
            finally:
                path.write_text(original)
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
                shutil.rmtree(build)

    def _keep_objects(self, name: str) -> Path:
        return (self.folder / "build").rename(self.folder / name)

    def _build(self, name: str) -> Path:
        self._run("cmake", "--build", "build", "--parallel", str(os.cpu_count() or 1))
        (built,) = (self.folder / "build").glob("_native*.so")
        kept = self.folder / "libraries" / name / built.name
        kept.parent.mkdir(parents=True)
        return Path(shutil.copy2(built, kept))

    def _run(self, *command: str) -> None:
        # With paths below the folder as relative ones, ccache knows objects of earlier copies.
        environment = {**os.environ, "CCACHE_BASEDIR": str(self.folder), "CCACHE_NOHASHDIR": "1"}
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise BuildError(f"{' '.join(command[:2])} failed: {(done.stdout + done.stderr)[-800:]}")
