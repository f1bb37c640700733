"""``make test-asan``: native kernels with AddressSanitizer, at every level of this CPU and on emulated tiles.

A read or write beyond a tensor, or of memory that has been freed, ends the process with a report in build/asan, since
pytest captures what a process writes. The compiler does not instrument loads through masks, so these are not checked.
Tiles are emulated where the CPU has AVX-512 with BF16 and VNNI, and their loads are checked.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.kernels.other_build import ROOT, build, loading

from quire.device import is_built

TESTS = ("tests/kernels", "tests/exact", "tests/quant", "tests/lora", "tests/sampling")
LEFT_OUT = ("tests/kernels/triton", "tests/exact/test_device.py")  # kernels of a GPU
# Python frees little when it ends, so leaks are not looked for.
OPTIONS = "detect_leaks=0:detect_odr_violation=0:allocator_may_return_null=1"


def libraries() -> str:
    """Return what Python must load first: the sanitizer, and the C++ library whose exceptions it intercepts."""
    paths = []
    for name in ("libasan.so", "libstdc++.so"):
        command = [os.environ.get("CXX", "c++"), f"-print-file-name={name}"]
        paths.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    return ":".join(paths)


def main() -> int:
    """Build, then run pytest with the arguments of the command line."""
    flags = "-fsanitize=address -fno-omit-frame-pointer -g1"
    tiles = "ON" if is_built("avx512") else "OFF"
    # At -O3 the instrumented kernels take several times as long to compile; every load is checked at -O1 as well.
    options = f"-DCMAKE_CXX_FLAGS={flags}", f"-DQUIRE_EMULATED_TILES={tiles}", "-DQUIRE_OPTIMIZATION=-O1"
    library = build(ROOT / "build" / "asan", *options)
    reports = library.parent / "report"
    for old in library.parent.glob("report.*"):
        old.unlink()
    sanitizer = {"LD_PRELOAD": libraries(), "ASAN_OPTIONS": f"{OPTIONS}:log_path={reports}"}
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-m", "not slow and not gpu",
            *(f"--ignore={path}" for path in LEFT_OUT), *TESTS, *sys.argv[1:],
        ],
        cwd=ROOT, env={**os.environ, **loading(library), **sanitizer},
    )  # fmt: skip
    for report in sorted(library.parent.glob("report.*")):
        print(report.read_text(errors="replace"), file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
