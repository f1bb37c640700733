"""Where each engine lives and how its adapter is started: Python, script, checkpoint, options, variables."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# CPUID family and model → name (/proc/cpuinfo).
CORES = {
    (6, 63): "haswell",
    (6, 79): "broadwell",
    (6, 85): "skylake",
    (6, 94): "skylake-client",
    (6, 106): "icelake",
    (6, 108): "icelake",
    (6, 126): "icelake-client",
    (6, 140): "tigerlake",
    (6, 141): "tigerlake",
    (6, 143): "sapphirerapids",
    (6, 151): "alderlake",
    (6, 154): "alderlake",
    (6, 167): "rocketlake",
    (6, 173): "graniterapids",
    (6, 183): "raptorlake",
    (6, 186): "raptorlake",
    (6, 207): "emeraldrapids",
    (23, 49): "zen2",
    (23, 113): "zen2-client",
    (25, 1): "zen3",
    (25, 33): "zen3-client",
    (25, 17): "zen4",
    (25, 97): "zen4-client",
    (25, 160): "zen4c",
    (26, 2): "zen5",
    (26, 17): "zen5c",
    (26, 68): "zen5-client",
}
# Of family 6, model 85, the first stepping of each later core.
STEPPINGS_OF_85 = {5: "cascadelake", 10: "cooperlake"}
WITH_TILES = ("sapphirerapids", "emeraldrapids", "graniterapids")
# Levels that `--isa` forces, as oneDNN, which vLLM computes with, calls them; None: without vLLM. OpenVINO chooses its
# kernels by the CPU and does not start where oneDNN may not follow.
FORCED = {"avx2": None, "avx512_vnni": "AVX512_CORE_VNNI"}
GGUF_NAMES = {"bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}
VLLM_NAMES = {"int8": "w8a8", "int4": "w4a16"}


def cpuinfo() -> dict[str, str]:
    pairs = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def machine_name() -> str:
    """Return the name of the results file: "emeraldrapids-2core"."""
    return f"{core_name(cpuinfo())}-{len(os.sched_getaffinity(0))}core"


def core_name(info: dict[str, str]) -> str:
    """Return the name of a core from what /proc/cpuinfo says of it; the architecture's where it is not known.

    Some hosts show another model than they have. One that never had tiles is then told by its instruction cache: 64 KiB
    from Granite Rapids on, 32 KiB before.
    """
    family, model, stepping = (int(info.get(name, 0)) for name in ("cpu family", "model", "stepping"))
    name = CORES.get((family, model), os.uname().machine)
    if "amx_tile" in info.get("flags", "").split() and name not in WITH_TILES:
        return "graniterapids" if instruction_cache() == "64K" else "sapphirerapids"
    later = [core for first, core in STEPPINGS_OF_85.items() if stepping >= first]
    return later[-1] if (family, model) == (6, 85) and later else name


def instruction_cache() -> str:
    """Return its size as Linux writes it, "" where Linux does not say."""
    caches = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")
    sizes = [(c / "size").read_text().strip() for c in caches if "Instruction" in (c / "type").read_text()]
    return sizes[0] if sizes else ""


def machine_words() -> str:
    info = cpuinfo()
    memory = Path("/proc/meminfo").read_text().split()[1]
    return f"{machine_name()} ({info.get('model name', '')}, {int(memory) / 2**20:.1f} GiB)"


def limited_to(level: str | None) -> dict[str, str]:
    """Return the variable that keeps oneDNN to a level. Kernels of the engine's own do not read it."""
    return {} if level is None else {"ONEDNN_MAX_CPU_ISA": level}


@dataclass(frozen=True)
class Adapter:
    command: list[str]
    environ: dict[str, str] = field(default_factory=dict)


class Environment:
    """``home`` has a folder an engine (`install.py`) and ``models`` (`convert.py`)."""

    def __init__(self, home: Path, checkpoints: Path) -> None:
        self.home = home
        self.checkpoints = checkpoints
        noted = home / "versions.json"
        self.versions: dict[str, str] = json.loads(noted.read_text()) if noted.exists() else {}

    def can(self, engine: str, workload: str) -> bool:
        """transformers has no scheduler to give arrivals to."""
        return not (engine == "transformers" and workload == "D")

    def adapter(
        self, engine: str, model: str, precision: str, isa: str = "native", ranks: int = 1
    ) -> Adapter | None:
        """Return how to run an engine, or None where it does not offer the combination."""
        limit = FORCED.get(isa)
        forcible = ("quire", "llama.cpp") if limit is None else ("quire", "llama.cpp", "vllm")
        if isa != "native" and engine not in forcible:
            return None
        if ranks != 1 and engine not in ("quire", "vllm"):
            return None
        source, made = self.checkpoints / model, self.home / "models"
        if engine == "quire":
            options: dict[str, Any] = {} if precision == "bf16" else {"quantize": precision}
            options |= {} if isa == "native" else {"cpu_isa": isa}
            options |= {} if ranks == 1 else {"tensor_parallel_size": ranks}
            return self._python("engine_quire", sys.executable, source, options)
        if engine == "transformers":
            return (
                self._python("engine_transformers", sys.executable, source) if precision == "bf16" else None
            )
        if engine == "llama.cpp":
            options = {"bin": str(self.home / f"llama-{isa}" / "bin")}
            file = made / f"{model}.{GGUF_NAMES[precision]}.gguf"
            return self._python("engine_llamacpp", sys.executable, file, options)
        python = self.home / engine / "bin" / "python"
        if engine == "openvino":
            return self._python("engine_openvino", str(python), made / f"{model}.ov-{precision}")
        assert engine == "vllm", f"engine {engine!r}"
        folder = source if precision == "bf16" else made / f"{model}.{VLLM_NAMES[precision]}"
        options = {} if ranks == 1 else {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}
        return self._python(
            "engine_vllm", str(python), folder, options, self._vllm(ranks) | limited_to(limit)
        )

    def _python(
        self, script: str, python: str, model: Path, options: dict[str, Any] | None = None,
        environ: dict[str, str] | None = None,
    ) -> Adapter:  # fmt: skip
        command = [python, str(HERE / f"{script}.py"), "--model", str(model)]
        command += ["--options", json.dumps(options or {})]
        return Adapter(command, {"HF_HUB_OFFLINE": "1", **(environ or {})})

    def _vllm(self, ranks: int) -> dict[str, str]:
        """What vLLM's CPU guide asks for: tcmalloc and Intel's OpenMP, loaded first; cores of each rank."""
        found = [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]
        found += (self.home / "vllm" / "lib").glob("libiomp5.so")
        cores = sorted(os.sched_getaffinity(0))
        size = len(cores) // ranks
        parts = [",".join(map(str, cores[r * size : (r + 1) * size])) for r in range(ranks)]
        return {"LD_PRELOAD": ":".join(map(str, found)), "VLLM_CPU_OMP_THREADS_BIND": "|".join(parts)}
