"""gpt-oss as it is published, experts in MXFP4, against transformers with the values that its own code expands."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.models.tiny import model_config
from tests.parity.families import CONTEXT, make
from tests.parity.harness import check
from tests.quant.perplexity import Text, nats
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.args import EngineArgs
from quire.models.checkpoint import describe
from quire.models.loader import iter_weights
from quire.modelspec import matrix_bytes, weight_shapes
from quire.quant.stored import StoredStack

TEXT = Text(((5, 9, 100, 101, 7, 150, 33, 34, 35, 8, 19, 77),), 1, 1)


def test_published_form(tmp_path: Path) -> None:
    model = make("gpt_oss", tmp_path, hidden_size=64)
    stored = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    parameters = dict(model.named_parameters())
    for name in [n for n in stored if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = stored.pop(name).shape  # [experts, in, out]
        blocks = torch.randint(
            0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator
        )
        scales = torch.randint(
            123, 126, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator
        )
        with torch.no_grad():
            parameters[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.embed_tokens"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(tmp_path, model, CONTEXT)
    held_as_in_the_file(tmp_path, stored)
    common: dict[str, Any] = {
        "model": str(tmp_path), "dtype": "float32", "cpu_isa": "reference", "max_model_len": 16,
    }  # fmt: skip
    exact, kept = nats(EngineArgs(**common, quantize="none"), TEXT), nats(EngineArgs(**common), TEXT)
    assert abs(kept - exact) <= 0.03 * exact  # activations in int8


def held_as_in_the_file(folder: Path, stored: dict[str, torch.Tensor]) -> None:
    """Check that the experts take as many bytes as in the file, but for 4 bytes per row."""
    found = describe(folder)
    shapes = {name: shape for name, shape in weight_shapes(found.spec).items() if name in found.formats}
    assert all(".moe." in name for name in shapes)
    assert {str(held) for held in found.formats.values()} == {"fp4, groups of 32, powers of two as scales"}
    held = sum(matrix_bytes(shape, "float32", found.formats[name]) for name, shape in shapes.items())
    rows = sum(prod(shape[:-1]) for shape in shapes.values())
    in_file = sum(t.nbytes for name, t in stored.items() if name.endswith(("_blocks", "_scales")))
    assert held == in_file + 4 * rows
    weights = dict(
        iter_weights(model_config(found.path, found.spec, formats=dict(found.formats)), torch.float32)
    )
    assert all(isinstance(weights[name], StoredStack) for name in shapes)
