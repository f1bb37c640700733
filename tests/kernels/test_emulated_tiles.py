"""Emulated tiles (csrc/cpu/amx_emulated.h) multiply as Intel's manual says, and engines run on them by default."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.kernels.checks import generator

from quire.args import EngineArgs
from quire.device import cpu_features, detect_device
from quire.engine.assemble import configure
from quire.kernels import registry
from quire.kernels.linear import linear, pack_empty, write_rows

if not cpu_features().get("amx_emulated"):
    pytest.skip("this build has no emulated tiles: make test-amx", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
SMALLEST = np.finfo(np.float32).tiny


def flushed(x: np.ndarray) -> np.ndarray:
    """Rounded to fp32; 0 for what is denormal there."""
    single = x.astype(np.float32)
    return np.where(np.abs(single) < SMALLEST, np.float32(0), single)


def product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x wᵀ by one instruction per 32 k: a sum of the even k and one of the odd k, one fma per product (Intel SDM).

    The 64 bits of a long double hold the product exactly, so that the conversion to fp32 is the rounding of the fma.
    """
    total = np.zeros((x.shape[0], w.shape[0]), np.float32)
    for first in range(0, x.shape[1], 32):
        sums = [np.zeros_like(total), np.zeros_like(total)]
        for k in range(first, min(first + 32, x.shape[1])):
            exact = x[:, k, None].astype(np.longdouble) * w[None, :, k]
            sums[k % 2] = flushed(sums[k % 2] + exact)
        total = flushed(total + flushed(sums[0] + sums[1]))
    return total


@pytest.mark.parametrize("size", [1.0, 1e-19, 1e18])
@pytest.mark.parametrize("in_features", [32, 70, 577])
def test_products_are_those_of_the_manual(in_features: int, size: float) -> None:
    """Products of numbers about 1e-19 are denormal."""
    rng = generator()
    x, w = ((torch.randn(rows, in_features, generator=rng) * size).bfloat16() for rows in (19, 40))
    packed = pack_empty(40, in_features, torch.bfloat16, bias=False, backend="amx")
    write_rows(packed, 0, w)
    actual = linear(x, packed, out_dtype=torch.float32).numpy()
    assert np.array_equal(actual, product(flushed(x.float().numpy()), flushed(w.float().numpy())))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/kernels/amx/faults.cpp, compiled."""
    made = tmp_path_factory.mktemp("faults") / "faults"
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-march=native", "-I", str(ROOT / "csrc")]
    source = ROOT / "tests" / "kernels" / "amx" / "faults.cpp"
    subprocess.run(
        [*command, "-DQUIRE_ISA=amx", "-DQUIRE_EMULATED_TILES", str(source), "-o", str(made)], check=True
    )
    return made


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("large", "ldtilecfg of tile 5 (17 rows of 64 bytes): larger than a tile"),
        ("empty", "ldtilecfg of tile 5 (16 rows of 0 bytes): only one of rows and bytes is 0"),
        ("ninth", "ldtilecfg of tile 8 (16 rows of 64 bytes): there are eight tiles"),
        ("unset", "tilezero of tile 0 (0 rows of 0 bytes): this thread has set no shapes, or released them"),
        ("shapeless", "tileloadd of tile 7 (0 rows of 0 bytes): this tile has no shape"),
        ("rows", "tdpbssd of tile 1 (16 rows of 32 bytes): it does not have the rows of the sums"),
        ("columns", "tdpbsud of tile 0 (16 rows of 64 bytes): it does not have the columns of the sums"),
        ("k", "tdpbf16ps of tile 2 (8 rows of 64 bytes): it does not have the k of the first factor"),
        ("released", "tilestored of tile 0 (0 rows of 0 bytes): this thread has set no shapes, or released them"),
    ],
)  # fmt: skip
def test_faults_end_the_process(program: Path, fault: str, line: str) -> None:
    done = subprocess.run([program, fault], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGABRT, f"emulated tiles: {line}\n")


def test_tiles_in_the_right_way_are_no_fault(program: Path) -> None:
    assert subprocess.run([program, ""]).returncode == 0


def test_engines_run_on_tiles() -> None:
    """The level that an engine takes unless another is asked for."""
    config, _ = configure(EngineArgs(model="quill"), detect_device())
    assert config.runner.kernels == "amx"
    chosen = registry.choose(config.runner).describe()
    assert [chosen[op] for op in ("linear", "quantized_linear", "attention")] == ["amx"] * 3


def test_the_peak_of_emulated_tiles_is_not_measured() -> None:
    assert registry.native is not None
    assert not [name for name in registry.native.dot_probes() if name.startswith("tdp")]
