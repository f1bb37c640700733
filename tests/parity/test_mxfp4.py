"""gpt-oss as it is published, experts in MXFP4, against transformers with the values that its own code expands."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tests.parity.families import CONTEXT, make
from tests.parity.harness import check
from transformers.integrations.mxfp4 import convert_moe_packed_tensors


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
