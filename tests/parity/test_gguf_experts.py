"""Mixtures of experts in GGUF's block types beside transformers on the expanded weights, and what is no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.models.test_gguf_file import write_gguf as write_small
from tests.models.tiny import model_config
from tests.parity.families import CONTEXT, make, save
from tests.parity.gguf_writer import write_gguf
from tests.parity.harness import VOCAB, compare, prompts_of, run_ragged
from tests.quant.perplexity import Text, nats
from transformers import PreTrainedModel

from quire.args import EngineArgs
from quire.errors import UnsupportedModelError
from quire.families.gguf_types import BLOCK_TYPES
from quire.models.checkpoint import describe
from quire.models.loader import iter_weights
from quire.quant.stored import StoredStack

Kind = gguf.GGMLQuantizationType
TEXT = Text(((5, 9, 100, 101, 7, 150, 33, 34, 35, 8, 19, 77),), 1, 1)
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16}
LATENT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "kv_lora_rank": 32, "q_lora_rank": 32,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip
# Case → (architecture, sizes that blocks of 32 divide, type of the experts, type of the other matrices).
CASES: dict[str, tuple[str, dict[str, Any], Kind, Kind]] = {
    "gpt_oss": ("gpt-oss", SIZES, Kind.MXFP4, Kind.Q8_0),
    "mixtral": ("llama", {**SIZES, "sliding_window": None}, Kind.Q4_0, Kind.Q8_0),
    "qwen3_moe": ("qwen3moe", {**SIZES, "moe_intermediate_size": 32}, Kind.Q8_0, Kind.Q4_0),
    "deepseek_v3": ("deepseek2", LATENT, Kind.Q4_0, Kind.Q8_0),
}


def is_matrix(name: str) -> bool:
    return not any(part in name for part in ("norm", "bias", "sinks", "ffn_gate_inp", "rope"))


def rounded(values: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Return what blocks of ``kind`` along the last dimension hold of ``values``."""
    array = np.ascontiguousarray(values.detach().numpy())
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind).copy())


def rounded_kv_b(weight: torch.Tensor, config: Any, kind: Kind) -> torch.Tensor:
    heads = weight.view(config.num_attention_heads, -1, weight.shape[1])
    keys, values = heads.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
    stored = rounded(keys.transpose(1, 2), kind).transpose(1, 2)
    return torch.cat((stored, rounded(values, kind)), dim=1).flatten(0, 1)


@torch.no_grad()
def round_model(model: PreTrainedModel, experts: Kind, others: Kind) -> None:
    """Give each matrix the values that its type can hold, in the order in which the file has them."""
    transposed = model.config.model_type == "gpt_oss"
    for name, tensor in model.named_parameters():
        if tensor.dim() < 2 or "norm" in name or name.endswith(("gate.weight", "router.weight", "bias")):
            continue
        if "kv_b_proj" in name:
            tensor.copy_(rounded_kv_b(tensor, model.config, others))
        elif ".experts." in name:
            held = tensor.transpose(1, 2) if transposed else tensor
            back = rounded(held, experts)
            tensor.copy_(back.transpose(1, 2) if transposed else back)
        else:
            tensor.copy_(rounded(tensor, others))


@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_transformers_on_the_expanded_weights(case: str, tmp_path: Path) -> None:
    arch, sizes, experts, others = CASES[case]
    model = make(case, tmp_path / "hf", **sizes)
    round_model(model, experts, others)
    save(model, tmp_path / "rounded")
    found = describe(tmp_path / "rounded")
    weights = dict(iter_weights(model_config(found.path, found.spec), torch.float32))
    plain = {name: weight for name, weight in weights.items() if isinstance(weight, torch.Tensor)}

    def type_of(name: str, shape: tuple[int, ...]) -> Kind | None:
        return (experts if "_exps" in name else others) if len(shape) > 1 and is_matrix(name) else None

    path = write_gguf(tmp_path / "model.gguf", arch, found.spec, plain, type_of=type_of)
    checkpoint = describe(path)
    held = {
        name: form for name, form in checkpoint.formats.items() if ".moe." in name and "shared" not in name
    }
    assert set(held.values()) == {BLOCK_TYPES[experts.name.lower()].held}
    assert len(held) == 3 * sum(layer.mlp.moe is not None for layer in checkpoint.spec.layers)
    run = run_ragged(path, prompts_of(VOCAB, 1)[:3], CONTEXT, new_tokens=16)
    assert compare(run, model) <= 1e-4
    stored_form = replace(model_config(path, checkpoint.spec), formats=checkpoint.formats)
    for name, weight in iter_weights(stored_form, torch.float32):
        values = weight if isinstance(weight, torch.Tensor) else weight.expand(torch.float32)
        assert isinstance(weight, StoredStack) == (name in held)
        torch.testing.assert_close(values, plain[name], rtol=0, atol=1e-6)
    if len(checkpoint.spec.kv_layout(CONTEXT).groups) > 1:
        return
    exact = nats(EngineArgs(model=str(path), dtype="float32", cpu_isa="reference", quantize="none"), TEXT)
    stored = nats(EngineArgs(model=str(path), dtype="float32", cpu_isa="reference"), TEXT)
    print(f"{case}: nats {stored:.4f} stored, {exact:.4f} expanded")
    assert abs(stored - exact) <= 0.03 * exact


def test_layers_for_multi_token_prediction_are_skipped_in_one_line(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_nextn_predict_layers(1)
        for name in ("blk.1.nextn.eh_proj.weight", "blk.1.nextn.enorm.weight"):
            writer.add_tensor(name, np.zeros(4, np.float32))

    found = describe(write_small(tmp_path / "model.gguf", add=add))
    assert found.spec.num_layers == 1
    (line,) = found.remarks
    assert line.startswith("11 tensors for multi-token prediction (nextn), for example blk.1.attn_k.weight")


REFUSED: dict[str, tuple[str, Callable[[gguf.GGUFWriter], None], str]] = {
    "projector": ("clip", lambda w: None, r"model\.gguf is the projector .* \(mmproj\)"),
    "type": ("llama", lambda w: w.add_type("mmproj"), r"model\.gguf is the projector .* \(mmproj\)"),
    "experts": (
        "qwen3",
        lambda w: w.add_expert_count(4),
        r"'qwen3' with experts is not supported; with experts are",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_are_no_model_are_refused_by_name(case: str, tmp_path: Path) -> None:
    arch, add, message = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=message):
        describe(write_small(tmp_path / "model.gguf", arch, add=add))
