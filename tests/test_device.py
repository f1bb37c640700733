"""The probe sees this machine, and the limits of a cgroup."""

from __future__ import annotations

import pytest

from quire import device
from quire.config import DeviceInfo


def test_this_machine() -> None:
    info = device.detect_device()
    assert info.num_cores >= 1
    assert 0 < info.memory_available_bytes <= info.memory_total_bytes
    assert info.isa in ("scalar", "avx2", "avx512_bw", "avx512_vnni", "avx512", "amx", "neon", "neon_i8mm")


def test_slow_kernels_say_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def info(isa: str, native: bool) -> DeviceInfo:
        return DeviceInfo("cpu", "a CPU", 2, 1 << 34, 1 << 33, isa=isa, native=native)

    assert device.slow_kernels(info("avx512", True), "avx512") is None
    assert device.slow_kernels(info("avx512", True), "avx2") is None
    assert "no AVX2" in str(device.slow_kernels(info("scalar", True), "scalar"))
    assert "--cpu-isa scalar was asked for" in str(device.slow_kernels(info("avx2", True), "scalar"))
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert "/usr/bin/c++ is here: reinstall" in str(device.slow_kernels(info("scalar", False), "reference"))
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "apt install g++" in str(device.slow_kernels(info("scalar", False), "reference"))


def test_cgroup_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n",
        "/sys/fs/cgroup/memory.max": f"{2**30}\n",
        "/sys/fs/cgroup/memory.current": f"{2**29 + 2**28}\n",
        "/sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {2**28}\n",
    }
    monkeypatch.setattr(device, "_read", lambda path: files.get(path, ""))
    assert device.memory_bytes() == (2**30, 2**29)  # page cache is given back under pressure
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert device.memory_bytes() == (8 * 2**30, 4 * 2**30)
