"""Builds of the native extension that are tested in place of the installed one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The text of sitecustomize.py, which every Python process with its folder on the path runs at start-up.
SITE = """
import importlib.util
import sys


class OtherBuild:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, {library!r}) if name == "quire._native" else None


sys.meta_path.insert(0, OtherBuild)
"""


def build(folder: Path, *options: str) -> Path:
    """Build the extension with options of CMake; return its path. Ends the process where a tool is missing."""
    missing = [tool for tool in ("cmake", os.environ.get("CXX", "c++")) if shutil.which(tool) is None]
    if missing:
        print(f"{', '.join(missing)} not found: install what the native extension needs", file=sys.stderr)
        sys.exit(2)
    subprocess.run(
        [
            "cmake", "-S", str(ROOT), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}", *(["-G", "Ninja"] if shutil.which("ninja") else []),
            *(["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []), *options,
        ],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    subprocess.run(["cmake", "--build", str(folder), "-j", str(os.cpu_count() or 1)], check=True)
    (library,) = folder.glob("_native*.so")
    return library


def loading(library: Path) -> dict[str, str]:
    """Return the environment in which Python processes load ``library``."""
    site = library.parent / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE.format(library=str(library)))
    return {"PYTHONPATH": str(site)}
