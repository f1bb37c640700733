"""Make the checkpoints, and what each peer wants of them, under --home/models. What is there is not made again.

python benchmarks/peers/convert.py [--models llama-1b,qwen3-0.6b,smol-135m]

vLLM        model.w8a8, model.w4a16    compressed-tensors, round to nearest
llama.cpp   model.{bf16,q8_0,q4_0}.gguf    by its own llama-quantize
OpenVINO    model.ov-{bf16,int8,int4}    by optimum-cli (nncf); int4 with group 128, or 64 where 128 does not divide
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from environment import HERE, ROOT

OPENVINO_FORMATS = {"bf16": "fp16", "int8": "int8", "int4": "int4"}


def sh(*command: str | Path) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})


def to_vllm(source: Path, made: Path) -> None:
    for scheme in ("w8a8", "w4a16"):
        target = made / f"{source.name}.{scheme}"
        if not (target / "model.safetensors").exists():
            sh(sys.executable, HERE / "vllm_checkpoint.py", source, target, "--scheme", scheme)


def to_gguf(source: Path, made: Path, tools: Path) -> None:
    plain = made / f"{source.name}.bf16.gguf"
    if not plain.exists():
        sh(sys.executable, HERE / "gguf_checkpoint.py", source, plain)
    for kind in ("q8_0", "q4_0"):
        target = made / f"{source.name}.{kind}.gguf"
        if not target.exists():
            sh(tools / "llama-quantize", plain, target, kind.upper())


def to_openvino(source: Path, made: Path, cli: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    group = 128 if config["hidden_size"] % 128 == 0 else 64
    for name, format_ in OPENVINO_FORMATS.items():
        target = made / f"{source.name}.ov-{name}"
        if (target / "openvino_model.bin").exists():
            continue
        extra = ["--group-size", str(group)] if name == "int4" else []
        sh(cli, "export", "openvino", "--model", source, "--task", "text-generation-with-past",
           "--weight-format", format_, *extra, target)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="llama-1b,qwen3-0.6b,smol-135m")
    parser.add_argument("--home", type=Path, default=Path("/tmp/peers"))
    parser.add_argument("--checkpoints", type=Path, default=Path("/tmp/models"))
    given = parser.parse_args()
    made = given.home / "models"
    made.mkdir(parents=True, exist_ok=True)
    for name in given.models.split(","):
        sh(sys.executable, ROOT / "benchmarks" / "make_checkpoint.py", name, "--out", given.checkpoints)
        source = given.checkpoints / name
        to_vllm(source, made)
        to_gguf(source, made, given.home / "llama-native" / "bin")
        to_openvino(source, made, given.home / "openvino" / "bin" / "optimum-cli")


if __name__ == "__main__":
    main()
