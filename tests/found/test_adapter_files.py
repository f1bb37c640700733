"""Adapters: which tensors PEFT applies, what more than LoRA of linears is applied, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lora.peft_files import PREFIX, end_tensors, linears, tensors, with_magnitudes, write_adapter
from tests.models import tiny

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.lora.adapter import read_adapter
from quire.weight_plan import adaptable

SHAPES = linears(tiny.tensors())
HEAD = {
    f"{PREFIX}lm_head.lora_A.weight": torch.zeros(4, 16),
    f"{PREFIX}lm_head.lora_B.weight": torch.zeros(64, 4),
}


def test_tensors_that_the_configuration_leaves_out_are_not_applied(tmp_path: Path) -> None:
    """As PEFT: target_modules, exclude_modules and layers_to_transform decide, whatever else the file has."""
    stored = tensors(SHAPES, 4)
    for changes, expected in (
        ({"target_modules": ["q_proj"]}, {"layers.0.attn.q", "layers.1.attn.q"}),
        ({"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.0.self_attn.v_proj"]},
         {"layers.0.attn.q", "layers.1.attn.q", "layers.1.attn.v"}),
        ({"target_modules": ["q_proj"], "layers_to_transform": 1}, {"layers.1.attn.q"}),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "layers"}, {"layers.0.attn.q"}),
        ({"target_modules": "all-linear"}, set(adaptable(tiny.SPEC))),
    ):  # fmt: skip
        file = read_adapter("a", write_adapter(tmp_path, stored | HEAD, **changes), tiny.SPEC)
        assert set(file.parts) == expected
        (line,) = file.remarks
        left_out = len(stored) + 2 - 2 * len(expected)
        assert line.startswith(
            f"adapter a: {left_out} tensors are of modules that adapter_config.json leaves out"
        )
    with pytest.raises(ModelLoadError, match="holds no tensors for the target_modules"):
        read_adapter(
            "a", write_adapter(tmp_path, HEAD, target_modules=["q_proj"], layers_to_transform=[7]), tiny.SPEC
        )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, {"lm_head"}),
        ({"target_modules": ["q_proj", "embed_tokens"]}, {"embed_tokens"}),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}, set()),
        ({"target_modules": ["q_proj", "lm_head"], "use_dora": True}, {"lm_head"}),
    ],
    ids=str,
)
def test_ends_of_the_model_and_dora_are_applied(
    settings: dict[str, Any], expected: set[str], tmp_path: Path
) -> None:
    """As people publish them: LoRA of embed_tokens and lm_head, modules_to_save, DoRA (`tests/lora/test_ends.py`)."""
    stored = tensors({name: shape for name, shape in SHAPES.items() if "q_proj" in name}, 4)
    stored |= end_tensors(64, 16, 4, *expected)
    for name in settings.get("modules_to_save", ()):
        module = "model.embed_tokens" if name == "embed_tokens" else name
        stored[f"{PREFIX}{module}.weight"] = torch.zeros(64, 16)
    if settings.get("use_dora"):
        stored = with_magnitudes(stored)
    file = read_adapter("a", write_adapter(tmp_path, stored, **settings), tiny.SPEC)
    assert set(file.parts) == {"layers.0.attn.q", "layers.1.attn.q"} | expected
    assert set(file.saved) == set(settings.get("modules_to_save", ()))
    assert all(
        (part.magnitude is not None) == settings.get("use_dora", False) for part in file.parts.values()
    )


@pytest.mark.parametrize(
    ("tensors_beside", "changes", "named"),
    [
        ({}, {"modules_to_save": ["score"]}, "modules_to_save has 'score'"),
        ({}, {"modules_to_save": ["model.norm"]}, "modules_to_save has 'model.norm'"),
        ({f"{PREFIX}lm_head.weight": torch.zeros(66, 16)}, {"modules_to_save": ["lm_head"]},
         "lm_head.weight has 66 ids and the model 64"),
    ],
)  # fmt: skip
def test_more_than_that_is_named(
    tensors_beside: dict[str, torch.Tensor], changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    stored = tensors({name: shape for name, shape in SHAPES.items() if "q_proj" in name}, 4)
    changes["target_modules"] = ["q_proj"]
    with pytest.raises(UnsupportedModelError, match=named):
        read_adapter("a", write_adapter(tmp_path, stored | tensors_beside, **changes), tiny.SPEC)
