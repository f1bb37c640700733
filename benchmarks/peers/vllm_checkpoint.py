"""Write a round-to-nearest quantized copy of a checkpoint in compressed-tensors form, which vLLM loads.

    python benchmarks/peers/vllm_checkpoint.py /tmp/models/llama-1b /tmp/peers/models/llama-1b.w8a8 --scheme w8a8

w8a8:  int8 weights, one scale an output feature; activations to int8 a token, at run time.
w4a16: int4 weights, one scale a group of inputs (the largest of 128, 64, 32 that divides every layer).
The output matrix and the embedding stay bf16 in both: vLLM quantizes linears only.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUPS = (128, 64, 32)


def int8_rows(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    q = (weight / scale).round().clamp(-127, 127).to(torch.int8)
    return {"weight": q, "weight_scale": scale.to(torch.bfloat16)}


def int4_groups(weight: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    out_features, in_features = weight.shape
    groups = weight.view(out_features, in_features // group, group)
    scale = groups.abs().amax(2) / 7.5
    q = (groups / scale[..., None]).round().clamp(-8, 7).view(out_features, in_features)
    # Eight nibbles in an int32, the first in the lowest bits, each plus 8.
    nibbles = (q.to(torch.int64) + 8).view(out_features, -1, 8)
    words = (nibbles << (4 * torch.arange(8))).sum(2)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    shape = torch.tensor([out_features, in_features])
    return {"weight_packed": words, "weight_scale": scale.to(torch.bfloat16), "weight_shape": shape}


def config_of(scheme: str, group: int) -> dict[str, Any]:
    """Return the ``quantization_config`` entry of config.json."""
    weights: dict[str, Any] = {"type": "int", "symmetric": True, "dynamic": False}
    activations = None
    if scheme == "w8a8":
        weights |= {"num_bits": 8, "strategy": "channel"}
        activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    else:
        weights |= {"num_bits": 4, "strategy": "group", "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if scheme == "w8a8" else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        },
        "kv_cache_scheme": None,
    }


def group_of(tensors: dict[str, torch.Tensor]) -> int:
    widths = {t.shape[1] for name, t in tensors.items() if name.endswith("proj.weight")}
    return next(group for group in GROUPS if all(width % group == 0 for width in widths))


def convert(source: Path, target: Path, scheme: str) -> None:
    tensors = load_file(source / "model.safetensors")
    group = group_of(tensors)
    made: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith("proj.weight"):
            made[name] = tensor
            continue
        parts = int8_rows(tensor.float()) if scheme == "w8a8" else int4_groups(tensor.float(), group)
        made |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in parts.items()}
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, target)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = config_of(scheme, group)
    (target / "config.json").write_text(json.dumps(config, indent=1))
    save_file({n: t.contiguous() for n, t in made.items()}, target / "model.safetensors", {"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--scheme", choices=["w8a8", "w4a16"], required=True)
    given = parser.parse_args()
    convert(given.source, given.target, given.scheme)
    print(given.target)


if __name__ == "__main__":
    main()
