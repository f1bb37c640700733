"""``make test-amx``: tests of the amx level on emulated tiles, on any CPU that has AVX-512 with BF16 and VNNI.

The native extension is built with csrc/cpu/amx_emulated.h in place of the tile instructions. Every Python process of
the run loads it instead of the installed one, so the engines of the tests run at level amx too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from quire.device import is_built

ROOT = Path(__file__).resolve().parents[3]
TESTS = (
    "tests/kernels", "tests/exact", "tests/runner", "tests/lora", "tests/quant", "tests/quill", "tests/parallel",
    "tests/speculate", "tests/engine/test_llm.py", "tests/engine/test_llm_lora.py", "tests/e2e/test_e2e_quill.py",
)  # fmt: skip
# GPU kernels in Triton's interpreter use no tiles.
LEFT_OUT = (
    "tests/kernels/triton", "tests/exact/test_device.py", "tests/runner/test_device.py",
    "tests/runner/test_device_batches.py", "tests/runner/test_device_sampler.py",
)  # fmt: skip
# The text of sitecustomize.py, which every Python process with its folder on the path runs at start-up.
SITE = """
import importlib.util
import sys


class EmulatedTiles:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, {library!r}) if name == "quire._native" else None


sys.meta_path.insert(0, EmulatedTiles)
"""


def build(folder: Path) -> Path:
    """Build the extension with emulated tiles; return its path."""
    subprocess.run(
        [
            "cmake", "-S", str(ROOT), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release", "-DQUIRE_EMULATED_TILES=ON",
            f"-DPython_EXECUTABLE={sys.executable}", *(["-G", "Ninja"] if shutil.which("ninja") else []),
            *(["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []),
        ],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    subprocess.run(["cmake", "--build", str(folder), "-j", str(os.cpu_count() or 1)], check=True)
    (library,) = folder.glob("_native*.so")
    return library


def main() -> int:
    """Build, then run pytest with the arguments of the command line."""
    missing = [tool for tool in ("cmake", os.environ.get("CXX", "c++")) if shutil.which(tool) is None]
    if missing:
        print(f"{', '.join(missing)} not found: install what the native extension needs", file=sys.stderr)
        return 2
    if not is_built("avx512"):
        print("Emulated tiles need a CPU with AVX-512, BF16 and VNNI (Zen 4, Cooper Lake).", file=sys.stderr)
        return 2
    library = build(ROOT / "build" / "amx")
    site = library.parent / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE.format(library=str(library)))
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-m", "not slow and not gpu",
            *(f"--ignore={path}" for path in LEFT_OUT), *TESTS, *sys.argv[1:],
        ],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(site)},
    )  # fmt: skip
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
