"""A whole model in each type of ggml: linears, a tied head and the embedding's rows, beside transformers."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tests.models.tiny import model_config
from tests.parity.families import CONTEXT, make
from tests.parity.gguf_writer import write_gguf
from tests.parity.harness import VOCAB, compare, prompts_of, run_ragged
from tests.quant.ggml_random import random_blocks
from tests.quant.perplexity import Text, nats

from quire.args import EngineArgs
from quire.families.gguf_types import BLOCK_TYPES
from quire.models.checkpoint import describe
from quire.models.loader import iter_weights

# Deviations of activations in int8 from exact ones, in nats of a model of random weights.
TEXT = Text(((5, 9, 100, 101, 7, 150, 33, 34, 35, 8, 19, 77),), 1, 1)


def unpaired(rows: np.ndarray, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of the rows of q and k."""
    halves = torch.from_numpy(rows.copy()).view(heads, -1, 2, rows.shape[1])
    return halves.transpose(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_tokens_equal_transformers_on_the_expanded_weights(name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name.upper()]
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "tie_word_embeddings": True,
    }
    oracle = make("llama", tmp_path / "hf", **sizes)
    found = describe(tmp_path / "hf")
    weights = dict(iter_weights(model_config(found.path, found.spec), torch.float32))
    plain = {key: weight for key, weight in weights.items() if isinstance(weight, torch.Tensor)}
    rng = np.random.default_rng(4)
    path = write_gguf(
        tmp_path / "model.gguf", "llama", found.spec, plain,
        type_of=lambda _, shape: kind if len(shape) == 2 else None,
        encode=lambda array, of: random_blocks(of, array.shape, 0.1, rng),
    )  # fmt: skip
    parts = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
             "ffn_down": "mlp.down_proj"}  # fmt: skip
    state = oracle.state_dict()
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.tensor_type != kind:
            continue
        rows = gguf.quants.dequantize(tensor.data, kind)
        *_, index, part, _ = (".." + tensor.name).split(".")
        heads = {"attn_q": 4, "attn_k": 2}.get(part)
        target = (
            "model.embed_tokens.weight"
            if part == "token_embd"
            else f"model.layers.{index}.{parts[part]}.weight"
        )
        state[target].copy_(torch.from_numpy(rows.copy()) if heads is None else unpaired(rows, heads))
    checkpoint = describe(path)
    assert checkpoint.formats["embed.weight"] == BLOCK_TYPES[name].held
    assert set(checkpoint.formats.values()) == {BLOCK_TYPES[name].held}
    expanded = run_ragged(path, prompts_of(VOCAB, 1)[:3], CONTEXT, new_tokens=8)
    assert compare(expanded, oracle) <= 1e-4
    exact = nats(EngineArgs(model=str(path), dtype="float32", cpu_isa="reference", quantize="none"), TEXT)
    stored = nats(EngineArgs(model=str(path), dtype="float32", cpu_isa="reference"), TEXT)
    print(f"{name}: nats {stored:.4f} stored, {exact:.4f} expanded")
    assert abs(stored - exact) <= 0.03 * exact
