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


def end_tensors(
    vocab_size: int, hidden_size: int, rank: int, *ends: str, seed: int = 7, std: float = 0.2
) -> dict[str, torch.Tensor]:
    """Random A and B for "embed_tokens", "lm_head" or both, under PEFT's names."""
    rng = torch.Generator().manual_seed(seed)
    shapes = {
        "embed_tokens": ("model.embed_tokens.lora_embedding_A", (rank, vocab_size)),
        "lm_head": ("lm_head.lora_A.weight", (rank, hidden_size)),
    }
    found = {}
    for end in ends:
        name, shape = shapes[end]
        found[PREFIX + name] = torch.randn(shape, generator=rng) * std
        out = hidden_size if end == "embed_tokens" else vocab_size
        found[PREFIX + name.replace("_A", "_B")] = torch.randn(out, rank, generator=rng) * std
    return found


def write_adapter(folder: Path, stored: dict[str, torch.Tensor], **changes: Any) -> Path:
    """Write adapter_config.json and adapter_model.safetensors; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(stored, folder / "adapter_model.safetensors")
    return folder


def shapes_of(spec: ModelSpec) -> dict[str, torch.Size]:
    """The linears of a model that can be adapted: name in checkpoints → shape."""
    sources = weight_map(spec).sources
    return {
        sources[f"{name}.weight"][0].names[0].removesuffix(".weight"): torch.Size(shape)
        for name, shape in adaptable(spec).items()
    }


def make_adapters(folder: Path, spec: ModelSpec) -> tuple[Adapter, ...]:
    """Of ranks 3, 8 and 17: on every linear, on some, and on one of a fused pair."""
    shapes = shapes_of(spec)
    found = []
    for index, (rank, some) in enumerate(((3, ""), (8, "self_attn"), (17, "v_proj"))):
        chosen = {name: shape for name, shape in shapes.items() if some in name}
        stored = tensors(chosen or shapes, rank, seed=index, std=0.4)
        targets = sorted({name.rpartition(".")[2] for name in chosen or shapes})
        path = write_adapter(folder / str(index), stored, r=rank, target_modules=targets)
        found.append(read_adapter(f"adapter-{index}", path, spec).adapter)
    return tuple(found)


def with_magnitudes(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make a DoRA of ``stored``: a magnitude for each output."""
    rng = torch.Generator().manual_seed(11)
    found = dict(stored)
    for name, tensor in stored.items():
        module, _, kind = name.partition(".lora_")
        if kind.startswith(("B", "embedding_B")):
            found[f"{module}.lora_magnitude_vector"] = 1.0 + torch.rand(tensor.shape[0], generator=rng)
    return found


def make_end_adapters(folder: Path, spec: ModelSpec) -> tuple[Adapter, ...]:
    """LoRA of both ends, whole ends of the adapter's own, and a DoRA of everything but the embedding."""
    vocab_size, hidden_size = spec.vocab_size, spec.hidden_size
    low = tensors(shapes_of(spec), 3, std=0.4)
    rng = torch.Generator().manual_seed(5)
    whole = {
        f"{PREFIX}{name}.weight": torch.randn(vocab_size, hidden_size, generator=rng) * 0.3
        for name in ("model.embed_tokens", "lm_head")
    }
    targets = sorted({name.rpartition(".")[2] for name in shapes_of(spec)})
    ends = ["embed_tokens", "lm_head"]
    files: tuple[tuple[dict[str, torch.Tensor], dict[str, Any]], ...] = (
        (low | end_tensors(vocab_size, hidden_size, 3, *ends), {"target_modules": [*targets, *ends]}),
        (low | whole, {"target_modules": targets, "modules_to_save": ends}),
        (
            with_magnitudes(low | end_tensors(vocab_size, hidden_size, 3, "lm_head")),
            {"target_modules": [*targets, "lm_head"], "use_dora": True},
        ),
    )
    found = []
    for index, (stored, settings) in enumerate(files):
        path = write_adapter(folder / f"end-{index}", stored, r=3, **settings)
        found.append(read_adapter(f"end-adapter-{index}", path, spec).adapter)
    return tuple(found)
