"""Whole models: formats that differ within a fused linear, and logits beside the expanded model's."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from tests.models.tiny import model_config
from tests.parity.gguf_writer import write_gguf
from tests.quant.perplexity import Text, nats

from quire.args import EngineArgs
from quire.kernels import registry
from quire.kernels.linear import pack_empty
from quire.kernels.registry import Backend
from quire.models.checkpoint import describe
from quire.models.hub import quill_path
from quire.models.loader import iter_weights
from quire.weight_format import GROUPS, WeightFormat

TEXT = Text(((5, 9, 100, 301, 7, 250, 33, 34, 35, 8, 19, 77),), 1, 1)


def mixed(name: str, shape: tuple[int, ...]) -> gguf.GGMLQuantizationType | None:
    """v apart from q and k, and up from gate, as Q4_K_M has some."""
    if len(shape) == 1:
        return None
    if shape[-1] % 32:
        return gguf.GGMLQuantizationType.F16
    special = {
        "attn_v": "Q8_0",
        "ffn_up": "Q5_1",
        "token_embd": "Q8_0",
        "attn_output": "Q5_0",
        "attn_q": "Q4_1",
    }
    kind = next((kind for part, kind in special.items() if part in name), "Q4_0")
    return gguf.GGMLQuantizationType[kind]


@pytest.fixture
def mixed_gguf(tmp_path: Path) -> Path:
    found = describe(quill_path("quill"))
    weights = dict(iter_weights(model_config(found.path, found.spec), torch.float32))
    plain = {name: weight for name, weight in weights.items() if isinstance(weight, torch.Tensor)}
    return write_gguf(tmp_path / "mixed.gguf", "llama", found.spec, plain, type_of=mixed)


def test_a_fused_linear_of_several_formats(mixed_gguf: Path) -> None:
    found = describe(mixed_gguf)
    kinds = {
        name.split(".", 2)[2]: str(held)
        for name, held in found.formats.items()
        if name.startswith("layers.2.")
    }
    assert kinds == {
        "attn.q.weight": "int4, groups of 32 with offsets", "attn.k.weight": "int4, groups of 32",
        "attn.v.weight": "int8, groups of 32", "attn.o.weight": "int5, groups of 32",
        "mlp.gate.weight": "int4, groups of 32", "mlp.up.weight": "int5, groups of 32 with offsets",
        "mlp.down.weight": "int4, groups of 32",
    }  # fmt: skip
    kept = nats(EngineArgs(model=str(mixed_gguf), dtype="float32", cpu_isa="reference"), TEXT)
    expanded = nats(
        EngineArgs(model=str(mixed_gguf), dtype="float32", cpu_isa="reference", quantize="none"), TEXT
    )
    print(f"nats: {kept:.4f} quantized, {expanded:.4f} expanded")
    assert abs(kept - expanded) <= 0.01 * expanded  # what is left are activations in int8


@pytest.mark.parametrize("level", registry.NATIVE_LEVELS)
def test_packed_memory_is_what_the_budget_counts(level: Backend) -> None:
    if level not in registry.backends("quantized_linear"):
        pytest.skip(f"the native extension is not built, or this CPU has no {level}")
    formats = [WeightFormat("int4", group, offset) for group in GROUPS["int4"] for offset in (False, True)]
    formats += [
        WeightFormat("int8", group, offset) for group in (*GROUPS["int8"], None) for offset in (False, True)
    ]
    for held in (*formats, WeightFormat("int4", 16)):
        packed = pack_empty(96, 300, torch.bfloat16, bias=False, backend=level, format=held)
        parts = [part for part in (packed.data, packed.scale, packed.offset) if part is not None]
        assert sum(part.nbytes for part in parts) == held.num_bytes(96, 300, 2), held
