"""Every kernel compiles for the GPUs supported: types and shared memory, which the interpreter does not check."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kernels.triton.device import WARNINGS

pytestmark = [WARNINGS, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles(capability: int, tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src"))), "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("compile_ops.py")
    done = subprocess.run(
        [sys.executable, str(script), str(capability)], env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for kernel in ("attend_items", "fold_items", "matmul_tiles", "normalize", "rope_store_heads"):
        assert f"{kernel}: " in done.stdout, done.stdout
