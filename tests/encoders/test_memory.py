"""An encoder that the memory cannot hold is refused before a weight is read, with the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.encoders.tiny import SIZES

from quire.args import EngineArgs
from quire.config import DeviceInfo
from quire.errors import ConfigError
from quire.families import spec_from_config
from quire.resolve import resolve
from quire.units import GIB

pytestmark = pytest.mark.unit

DEVICE = DeviceInfo("cpu", "test", 2, 16 * GIB, 8 * GIB, isa="avx512", native=True)
CONFIG = {
    **SIZES, "architectures": ["BertModel"], "model_type": "bert", "hidden_size": 384, "intermediate_size": 1536,
    "num_attention_heads": 12, "max_position_embeddings": 8192, "vocab_size": 30522,
}  # fmt: skip


def test_matrices_are_rotated_before_they_are_rounded() -> None:
    config = resolve(EngineArgs("bert", quantize="int8"), spec_from_config(CONFIG), DEVICE)
    assert {(held.kind, held.rotation) for held in config.model.formats.values()} == {("int8", 64)}


def test_weights_and_the_largest_step_have_to_fit() -> None:
    spec, args = spec_from_config(CONFIG), EngineArgs("bert")
    needed = spec.weight_bytes("float32")
    assert resolve(args, spec, DEVICE).scheduler.max_num_batched_tokens == 8192
    with pytest.raises(ConfigError, match=r"of weights and .* for a step of 8192 tokens"):
        resolve(args, spec, replace(DEVICE, memory_available_bytes=needed))
    # Fewer tokens per step need less.
    smaller = replace(args, max_model_len=128, max_num_batched_tokens=128)
    resolve(smaller, spec, replace(DEVICE, memory_available_bytes=needed + 16 * 1024 * 1024))
