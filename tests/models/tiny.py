"""A tiny Llama on disk, written by hand so that a test can break any byte of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire.config import ModelConfig
from quire.families import spec_from_config, weight_map
from quire.modelspec import ModelSpec

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPEC: ModelSpec = spec_from_config(CONFIG)


def tensors(dtype: torch.dtype = torch.float32, config: dict[str, Any] = CONFIG) -> dict[str, torch.Tensor]:
    """Random tensors under the checkpoint's names."""
    generator = torch.Generator().manual_seed(7)
    found = {}
    for takes in weight_map(spec_from_config(config)).sources.values():
        for name in takes[0].names:
            found[name] = torch.randn(takes[0].shape, generator=generator).to(dtype)
    return found


def write_model(
    folder: Path, stored: dict[str, torch.Tensor] | None = None, *, shards: int = 1, **changes: Any
) -> Path:
    """Write config.json and ``shards`` safetensors files; return the folder."""
    stored = tensors() if stored is None else stored
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    if shards == 1:
        save_file(stored, folder / "model.safetensors")
        return folder
    names = list(stored)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        save_file({name: stored[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def model_config(path: Path, spec: ModelSpec = SPEC, **more: Any) -> ModelConfig:
    return ModelConfig(str(path), path.name, spec, "float32", "float32", 128, **more)
