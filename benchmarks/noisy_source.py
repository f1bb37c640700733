"""A 16-bit checkpoint from a GGUF file: its numbers, plus seeded uniform noise of half a step of the file's own grid.

    python -m benchmarks.noisy_source FILE.gguf OUT [--steps 0.5] [--seed 0]

Quantizers are compared on it. Without the noise, a method that finds the grid of the file again would lose nothing. The
folder is one of transformers, with the tokenizer that it makes of the file's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from quire.args import EngineArgs
from quire.device import detect_device
from quire.families import spec_from_config, weight_map
from quire.models.checkpoint import describe, stored_sources
from quire.models.loader import iter_weights
from quire.models.stored_weights import open_quantized
from quire.parallel.shard import Cut
from quire.quant.stored import StoredMatrix
from quire_lab.eval.model import find_model
from quire_lab.quantize.folder import write_safetensors


def noise_of(matrix: StoredMatrix, steps: float, generator: torch.Generator) -> Tensor:
    """Return uniform noise of ±``steps`` of each group's scale, fp32 ``[out, in]``."""
    rows = [part for _, part in matrix.ranges()]
    scale = torch.cat([part.scale for part in rows])
    per_group = matrix.shape[1] // scale.shape[1]
    noise = torch.rand(matrix.shape, generator=generator).mul_(2.0).sub_(1.0)
    return noise * scale.repeat_interleave(per_group, 1) * steps


def make(file: Path, out: Path, steps: float, seed: int) -> None:
    out.mkdir(parents=True)
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    config.dtype = torch.bfloat16
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)
    config.save_pretrained(out)
    of_file = describe(file)
    spec = spec_from_config(json.loads((out / "config.json").read_text()))
    names = {canonical: takes[0].names for canonical, takes in weight_map(spec).sources.items()}
    stored, sources = stored_sources(file, of_file.spec)
    found = find_model(EngineArgs(model=str(file)), detect_device(), expand=True)
    plus_one = spec.norm_plus_one and not of_file.spec.norm_plus_one
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for canonical, weight in iter_weights(found.config.model, torch.float32):
        assert isinstance(weight, Tensor)
        source = sources[canonical]
        if source.held.quantized and steps:
            matrix = open_quantized(source, stored, Cut(canonical))
            assert isinstance(matrix, StoredMatrix)
            weight = weight + noise_of(matrix, steps, generator)
        if plus_one and canonical.endswith("norm.weight"):
            weight = weight - 1.0
        (name,) = names[canonical]
        tensors[name] = weight.to(torch.bfloat16)
    write_safetensors(out / "model.safetensors", tensors)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    make(given.file, given.out, given.steps, given.seed)
