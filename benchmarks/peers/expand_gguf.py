"""Expand a GGUF file to a folder of transformers, and convert that for OpenVINO: MODEL-int8 and MODEL-int4.

    python expand_gguf.py FILE.gguf MODEL FOLDER

Runs where optimum-intel, nncf, gguf and accelerate are installed. The defaults of optimum-cli are kept, except that
int4 has groups of 64 where 128 does not divide the inputs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Convert one file; what is there already is not made again."""
    file, model, folder = Path(sys.argv[1]).expanduser(), sys.argv[2], Path(sys.argv[3])
    plain = folder / f"{model}-plain"
    if not plain.exists():
        expanded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        expanded.save_pretrained(plain)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(plain)
    config = AutoModelForCausalLM.from_pretrained(plain).config
    group = 128 if config.hidden_size % 128 == 0 else 64
    for bits in ("int8", "int4"):
        target = folder / f"{model}-{bits}"
        if not (target / "openvino_model.bin").exists():
            more = ["--group-size", str(group)] if bits == "int4" else []
            command = [
                str(Path(sys.executable).with_name("optimum-cli")),
                "export",
                "openvino",
                "--model",
                str(plain),
            ]
            command += ["--task", "text-generation-with-past", "--weight-format", bits, *more, str(target)]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
