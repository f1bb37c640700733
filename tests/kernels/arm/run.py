"""``make test-arm``: the native kernels on Arm CPUs that qemu emulates, without Python or torch on Arm.

The program (main.cpp and the binding files of csrc) is cross-compiled; the cases and their values come from the x86
kernels of this machine, at the scalar level and at avx2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.kernels.arm.recorder import write
from tests.kernels.arm.recurrent_cases import recurrent_cases
from tests.kernels.arm.write_cases import all_cases

from quire import _native

ROOT = Path(__file__).resolve().parents[3]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# Models of qemu and the best level of each: Armv8.0; with dot products; with i8mm and bf16, without and with SVE2.
CPUS = {"cortex-a72": "scalar", "neoverse-n1": "neon", "max,sve=off": "neon_i8mm", "max": "neon_i8mm"}


def build(folder: Path) -> Path:
    """Cross-compile the program with the flags of the real build."""
    launcher = [f"-DCMAKE_CXX_COMPILER_LAUNCHER={ccache}"] if (ccache := shutil.which("ccache")) else []
    subprocess.run(
        [
            "cmake", "-S", str(ROOT), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_SYSTEM_NAME=Linux",
            "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={COMPILER}", "-DQUIRE_KERNEL_TEST=ON",
            "-DCMAKE_EXE_LINKER_FLAGS=-static", *launcher,
        ],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    subprocess.run(["cmake", "--build", str(folder), "-j", str(os.cpu_count() or 1)], check=True)
    return folder / "_native"


def main() -> int:
    if missing := [tool for tool in ("cmake", COMPILER, EMULATOR) if shutil.which(tool) is None]:
        print(
            f"{', '.join(missing)} not found: run `make services` (Debian), or install them", file=sys.stderr
        )
        return 2
    if not _native.has_isa("avx2"):
        print("The expected values need an x86 machine with AVX2.", file=sys.stderr)
        return 2
    program = build(ROOT / "build" / "arm")
    cases = all_cases() + recurrent_cases()
    write(cases, program.parent)
    failed = 0
    for cpu, best in CPUS.items():
        print(f"{cpu}: {len(cases)} cases, best level {best}", flush=True)
        done = subprocess.run(
            [EMULATOR, "-cpu", cpu, str(program), "cases.txt", "cases.bin", best], cwd=program.parent
        )
        failed += done.returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
