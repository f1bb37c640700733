"""Adapters: which tensors PEFT applies, and what more than LoRA beside linears is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lora.peft_files import PREFIX, linears, tensors, write_adapter
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
    ("tensors_beside", "changes", "named"),
    [
        (HEAD, {"target_modules": ["q_proj", "lm_head"]}, "an adapter of lm_head is not supported"),
        ({}, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({}, {"use_dora": True}, "use_dora"),
        ({f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.zeros(4, 64)},
         {"target_modules": ["q_proj", "embed_tokens"]}, "adapters of the token embedding"),
    ],
)  # fmt: skip
def test_more_than_lora_beside_linears_is_named(
    tensors_beside: dict[str, torch.Tensor], changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    stored = tensors({name: shape for name, shape in SHAPES.items() if "q_proj" in name}, 4)
    with pytest.raises(UnsupportedModelError, match=named):
        read_adapter("a", write_adapter(tmp_path, stored | tensors_beside, **changes), tiny.SPEC)
