"""What is said of a GPU, or of its absence; what is resolved for one. The driver's libraries are stood in for."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
from tests.runner.tiny import llama

from quire.args import EngineArgs
from quire.config import DeviceInfo, EngineConfig
from quire.device import GpuInfo, find_gpu, gpu_problem
from quire.errors import ConfigError
from quire.resolve import resolve
from quire.weight_format import WeightFormat

H200 = GpuInfo("NVIDIA H200", (9, 0), 12_080, 141 << 30, 140 << 30)


class Library:
    """libcuda and libnvidia-ml as ctypes shows them: results go out by reference, the status is returned."""

    def __init__(self, status: int = 0, count: int = 1) -> None:
        self._status, self._count = status, count

    def cuInit(self, flags: int) -> int:
        return self._status

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = self._count
        return 0

    def cuDeviceGet(self, out: Any, index: int) -> int:
        return 0

    def cuDeviceGetName(self, buffer: Any, size: int, device: Any) -> int:
        buffer.value = b"NVIDIA H200"
        return 0

    def cuDeviceTotalMem_v2(self, out: Any, device: Any) -> int:
        out._obj.value = 141 << 30
        return 0

    def cuDeviceGetAttribute(self, out: Any, number: int, device: Any) -> int:
        out._obj.value = {75: 9, 76: 0}[number]
        return 0

    def cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = 12_080
        return 0

    def cuDeviceGetPCIBusId(self, buffer: Any, size: int, device: Any) -> int:
        buffer.value = b"0000:01:00.0"
        return 0

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus: Any, out: Any) -> int:
        return 0 if bus.value == b"0000:01:00.0" else 1

    def nvmlDeviceGetMemoryInfo(self, handle: Any, out: Any) -> int:
        out._obj.free = 140 << 30
        return 0


def test_a_gpu_is_described() -> None:
    library = Library()
    assert find_gpu(lambda name: library) == H200
    assert gpu_problem(H200) is None


def test_free_memory_is_the_whole_where_nobody_tells() -> None:
    def load(name: str) -> Library:
        if "nvidia-ml" in name:
            raise OSError(name)
        return Library()

    assert find_gpu(load) == replace(H200, memory_available_bytes=141 << 30)


def test_why_there_is_no_gpu() -> None:
    def nothing(name: str) -> Library:
        raise OSError(name)

    assert "No NVIDIA driver" in str(find_gpu(nothing))
    assert "cuInit gave 100" in str(find_gpu(lambda name: Library(status=100)))
    assert "CUDA_VISIBLE_DEVICES" in str(find_gpu(lambda name: Library(count=0)))
    assert isinstance(find_gpu(ctypes.CDLL), GpuInfo | str), "on the machine at hand"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"driver": 11_040}, "CUDA up to 11.4, and 12.0 is needed"),
        ({"capability": (7, 5)}, "compute capability 7.5; 8.0 or more"),
    ],
)
def test_a_gpu_that_cannot_be_used(changes: dict[str, Any], said: str) -> None:
    assert said in str(gpu_problem(replace(H200, **changes)))


def resolved(device: DeviceInfo, **settings: Any) -> EngineConfig:
    return resolve(EngineArgs(max_num_batched_tokens=64, max_num_seqs=4, **settings), llama(), device)


GPU = DeviceInfo("cuda", "NVIDIA H200", 8, 8 << 30, 8 << 30, capability=(9, 0))
CPU = DeviceInfo("cpu", "CPU", 8, 8 << 30, 8 << 30)


def test_kernels_and_promise() -> None:
    assert (resolved(GPU).runner.kernels, resolved(GPU).determinism) == ("triton", "batch-dependent")
    invariant = resolved(GPU, batch_invariant=True)
    assert (invariant.runner.kernels, invariant.determinism) == ("invariant", "exact")
    assert resolved(CPU, batch_invariant=True).determinism == "exact"


def test_the_cache_takes_what_is_left() -> None:
    """Weights, activations, workspace and graphs come first."""
    config = resolved(GPU)
    page = config.kv_layout.block_bytes(16, config.model.kv_dtype)
    left = (8 << 30) * 0.9 - (1 << 30) - (512 << 20)
    assert left - (64 << 20) < config.cache.num_blocks * page < left
    small = resolved(GPU, gpu_memory="2GiB").cache.num_blocks * page
    assert small < 1 << 30


@pytest.mark.parametrize(
    ("device", "settings", "said"),
    [
        (GPU, {"gpu_memory": "9GiB"}, "gpu_memory = 9.00 GiB is more than the 8.00 GiB"),
        (CPU, {"gpu_memory": "1GiB"}, "gpu_memory = '1GiB' is for a GPU"),
        (GPU, {"cpu_isa": "avx2"}, "cpu_isa = 'avx2' is for a CPU"),
        (CPU, {"quantize": "fp8"}, "need a GPU of compute capability 8.9"),
        (CPU, {"kv_dtype": "fp8"}, "needs a GPU of compute capability 8.9"),
        (replace(GPU, capability=(8, 0)), {"kv_dtype": "fp8"}, "needs a GPU of compute capability 8.9"),
    ],
)
def test_settings_that_do_not_fit(device: DeviceInfo, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        resolved(device, **settings)


def test_fp8_weights_are_held_where_they_can_be_multiplied() -> None:
    """Else expanded, and said so; int8 of them may be asked for instead."""
    name = "layers.0.mlp.up.weight"
    stored = {name: WeightFormat("fp8")}
    on_gpu = resolve(EngineArgs(), llama(), GPU, stored=stored)
    assert on_gpu.model.formats == stored
    for device in (CPU, replace(GPU, capability=(8, 0))):
        elsewhere = resolve(EngineArgs(), llama(), device, stored=stored)
        assert elsewhere.model.formats == {}
        assert "1 fp8 weights read as" in elsewhere.model.remarks[0]
        asked = resolve(EngineArgs(quantize="int8"), llama(), device, stored=stored)
        assert asked.model.formats[name] == WeightFormat("int8", rotation=16 if device is CPU else None)
    with pytest.raises(ConfigError, match="quantized already"):
        resolve(EngineArgs(quantize="int8"), llama(), GPU, stored=stored)
