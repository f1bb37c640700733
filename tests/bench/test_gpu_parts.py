"""Every part of the GPU benchmark runs at toy sizes in the interpreter, with what a bare container has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.test_arrows import BARE_LACKS

pytest.importorskip("triton", reason="the kernels of a GPU need Triton: pip install -e '.[dev]' has it")

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.triton_interpret


def run(module: str, *arguments: str) -> str:
    code = "\n".join(
        [
            "import sys, runpy",
            *(f"sys.modules[{name!r}] = None" for name in BARE_LACKS),
            f"sys.argv = {[module, *arguments]!r}",
            f"runpy.run_module({module!r}, run_name='__main__')",
        ]
    )
    env = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_every_part_runs(tmp_path: Path) -> None:
    run("benchmarks.gpu.run", "all", "--tiny", "--out", str(tmp_path))
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert {"decode-attention", "w4a16", "norm", "end-to-end", "throughput", "mixture"} <= set(found)
    for each in found.values():
        assert each["tiny"]
        assert each["rows"]
        assert all(row["share_of_bound"] > 0 for row in each["rows"])
    assert "nothing measured" in run("benchmarks.gpu.run", "render", "--out", str(tmp_path))


@pytest.mark.slow
def test_the_tuner_writes_a_table(tmp_path: Path) -> None:
    run(
        "benchmarks.gpu.tune",
        "--tiny",
        "--ops",
        "int_linear_small",
        "fp8_linear_small",
        "attention_decode",
        "--out",
        str(tmp_path),
    )
    table = json.loads((tmp_path / "interpreter.json").read_text())
    sizes = {"rows", "columns", "inner", "warps", "stages"}
    assert set(table["int_linear_small"]["int4_n48_k64"]) == {*sizes, "programs"}
    assert set(table["fp8_linear_small"]) == {"g128_n48_k256", "g0_n48_k256"}
    assert set(table["fp8_linear_small"]["g0_n48_k256"]) == sizes
