"""``make test-amx``: tests of the amx level on emulated tiles, on any CPU that has AVX-512 with BF16 and VNNI.

The native extension is built with csrc/cpu/amx_emulated.h in place of the tile instructions. Every Python process of
the run loads it instead of the installed one, so the engines of the tests run at level amx too.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.kernels.other_build import ROOT, build, loading

from quire.device import is_built

TESTS = (
    "tests/kernels", "tests/exact", "tests/runner", "tests/lora", "tests/quant", "tests/quill", "tests/parallel",
    "tests/speculate", "tests/engine/test_llm.py", "tests/engine/test_llm_lora.py", "tests/e2e/test_e2e_quill.py",
)  # fmt: skip
# GPU kernels in Triton's interpreter use no tiles.
LEFT_OUT = (
    "tests/kernels/triton", "tests/exact/test_device.py", "tests/runner/test_device.py",
    "tests/runner/test_device_batches.py", "tests/runner/test_device_sampler.py",
)  # fmt: skip


def main() -> int:
    """Build, then run pytest with the arguments of the command line."""
    if not is_built("avx512"):
        print("Emulated tiles need a CPU with AVX-512, BF16 and VNNI (Zen 4, Cooper Lake).", file=sys.stderr)
        return 2
    library = build(ROOT / "build" / "amx", "-DQUIRE_EMULATED_TILES=ON")
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-m", "not slow and not gpu",
            *(f"--ignore={path}" for path in LEFT_OUT), *TESTS, *sys.argv[1:],
        ],
        cwd=ROOT, env={**os.environ, **loading(library)},
    )  # fmt: skip
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
