"""Gemma 4's table of embeddings per layer in ggml's blocks: held as it is stored, one row expanded per token."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tests.models.tiny import model_config
from tests.parity.families import CONTEXT, make, save
from tests.parity.gguf_writer import write_gguf
from tests.parity.harness import VOCAB, compare, prompts_of, run_ragged

from quire.families.gguf_types import BLOCK_TYPES
from quire.models.checkpoint import describe
from quire.models.loader import iter_weights

TABLE = "per_layer_token_embd.weight"


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_a_quantized_table_is_read_row_by_row(name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    model = make("gemma4", tmp_path / "hf", hidden_size_per_layer_input=32)
    table = model.model.embed_tokens_per_layer.weight
    with torch.no_grad():
        array = np.ascontiguousarray(table.numpy())
        table.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind).copy()))
    save(model, tmp_path / "rounded")
    found = describe(tmp_path / "rounded")
    weights = dict(iter_weights(model_config(found.path, found.spec), torch.float32))
    plain = {key: weight for key, weight in weights.items() if isinstance(weight, torch.Tensor)}

    def type_of(stored: str, shape: tuple[int, ...]) -> gguf.GGMLQuantizationType | None:
        return kind if stored == TABLE else None

    path = write_gguf(tmp_path / "model.gguf", "gemma4", found.spec, plain, type_of=type_of)
    assert describe(path).formats == {"per_layer.table.weight": BLOCK_TYPES[name.lower()].held}
    run = run_ragged(path, prompts_of(VOCAB, 1)[:3], CONTEXT, new_tokens=16)
    assert compare(run, model) <= 1e-4
