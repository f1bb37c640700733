"""PEFT adapters on disk, written by hand so that a test can break any part of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

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


def merged(
    base: dict[str, torch.Tensor], stored: dict[str, torch.Tensor], scale: float
) -> dict[str, torch.Tensor]:
    """The checkpoint with ``W + scale · B A`` in fp32 for every linear that the adapter has."""
    found = dict(base)
    for name in stored:
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            low, high = stored[name].float(), stored[name.replace("lora_A", "lora_B")].float()
            weight = found[f"{module}.weight"]
            found[f"{module}.weight"] = (weight.float() + scale * high @ low).to(weight.dtype)
    return found
