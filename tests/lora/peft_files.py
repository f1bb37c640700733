"""PEFT adapters on disk, written by hand so that a test can break any part of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire.families import weight_map
from quire.lora.adapter import read_adapter
from quire.modelspec import ModelSpec
from quire.request import Adapter
from quire.weight_plan import adaptable

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "tiny",
    "r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.05,
    "use_rslora": False,
    "use_dora": False,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "target_modules": list(ALL),
    "init_lora_weights": True,
    "inference_mode": True,
}
PREFIX = "base_model.model."


def linears(stored: dict[str, torch.Tensor], targets: tuple[str, ...] = ALL) -> dict[str, torch.Size]:
    """The linears of a checkpoint that ``targets`` name: name → shape."""
    return {
        name.removesuffix(".weight"): tensor.shape
        for name, tensor in stored.items()
        if name.removesuffix(".weight").rpartition(".")[2] in targets
    }


def tensors(
    shapes: dict[str, torch.Size],
    rank: int,
    *,
    seed: int = 1,
    std: float = 0.2,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Random A and B for every linear, under PEFT's names."""
    rng = torch.Generator().manual_seed(seed)
    found = {}
    for module, (out, into) in shapes.items():
        for which, shape in (("A", (rank, into)), ("B", (out, rank))):
            found[f"{PREFIX}{module}.lora_{which}.weight"] = (torch.randn(shape, generator=rng) * std).to(
                dtype
            )
    return found


def write_adapter(folder: Path, stored: dict[str, torch.Tensor], **changes: Any) -> Path:
    """Write adapter_config.json and adapter_model.safetensors; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(stored, folder / "adapter_model.safetensors")
    return folder


def make_adapters(folder: Path, spec: ModelSpec) -> tuple[Adapter, ...]:
    """Of ranks 3, 8 and 17: on every linear, on some, and on one of a fused pair."""
    sources = weight_map(spec).sources
    shapes = {
        sources[f"{name}.weight"][0].names[0].removesuffix(".weight"): torch.Size(shape)
        for name, shape in adaptable(spec).items()
    }
    found = []
    for index, (rank, some) in enumerate(((3, ""), (8, "self_attn"), (17, "v_proj"))):
        chosen = {name: shape for name, shape in shapes.items() if some in name}
        stored = tensors(chosen or shapes, rank, seed=index, std=0.4)
        targets = sorted({name.rpartition(".")[2] for name in chosen or shapes})
        path = write_adapter(folder / str(index), stored, r=rank, target_modules=targets)
        found.append(read_adapter(f"adapter-{index}", path, spec).adapter)
    return tuple(found)
