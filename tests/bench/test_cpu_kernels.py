"""`benchmarks/cpu_kernels.py`: its bytes, operations and bounds, on a machine that a test cannot know."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from benchmarks import cpu_kernels as kernel
from tests.kernels.cases import LINEAR

from quire.cost.hardware import Bounds
from quire.errors import ConfigError
from quire.kernels import registry

native = pytest.importorskip("quire._native")


def test_the_probes_measure_what_this_cpu_has() -> None:
    names = native.dot_probes()
    features = native.cpu_features()
    assert ("fma_avx2" in names) == features["avx2"]
    assert ("vdpbf16ps" in names) == features["avx512_bf16"]
    for name in names:
        assert native.probe_dot(1, name, 1) > 1e9
    assert 0 < native.probe_read(1, 1 << 24, 1) < 10
    with pytest.raises(ValueError, match="no probe of mmx"):
        native.probe_dot(1, "mmx", 1)


def test_a_row_has_rates_and_the_share_of_the_slower_bound() -> None:
    job = kernel.Job("linear", "x", "avx512", 2_000_000, 8_000_000, "float", lambda: None)
    bounds = Bounds(read=1e9, dots={"vdpbf16ps": 2e9})  # 2 ms to read, 4 ms to multiply
    row = kernel.row_of(job, 0.008, bounds)
    assert row.gb_s == pytest.approx(0.25)
    assert row.gop_s == pytest.approx(1.0)
    assert row.bound_us == pytest.approx(4000)
    assert row.share == pytest.approx(0.5)
    assert kernel.row_of(job, 0.008, Bounds(1e9, {})).share is None


def test_linear_jobs_are_the_bench_cases_and_count_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    isa = registry.backends("linear")[0]
    if isa not in registry.NATIVE_LEVELS:
        pytest.skip("no native kernels")
    monkeypatch.setattr(kernel, "FORMATS", [format for format in kernel.FORMATS if not format.quantized])
    jobs = [job for job in kernel.linear_jobs(isa) if job.case.startswith("bf16")]
    shapes = [case for case in LINEAR if case.bench]
    assert len(jobs) == len(shapes)
    for job, case in zip(jobs, shapes, strict=True):
        numbers = case.in_features * case.out_features
        assert job.operations == 2 * case.num_tokens * numbers
        rows = 2 * case.num_tokens * (case.in_features + case.out_features)
        assert job.num_bytes == 2 * numbers + rows  # 2048 and 8192 are whole panels


@pytest.mark.skipif(not native.has_isa("avx2"), reason="needs AVX2")
def test_the_command_prints_json() -> None:
    command = [sys.executable, "-m", "benchmarks.cpu_kernels", "--op", "norm", "--isa", "avx2"]
    done = subprocess.run(
        [*command, "--threads", "1", "--seconds", "0", "--json"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["isa"] == "avx2"
    assert made["bounds"]["read"] > 1e8
    assert {row["op"] for row in made["rows"]} == {"norm"}
    assert all(row["microseconds"] > 0 and row["isa"] == "avx2" for row in made["rows"])


def test_an_unknown_op_or_level_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"one of linear, attention, norm, sampling \(did you mean 'norm'\?\)"
    ):
        kernel.check_choices("norms", "avx2")
    with pytest.raises(ConfigError, match="this CPU and build have "):
        kernel.check_choices(None, "mmx")
