"""Queries that are scaled by their position: the factors, and the files of Ministral 3 and Mistral Small 4."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from quire.errors import QuireError
from quire.families import spec_from_config
from quire.layers.rope import query_factors

SIZES = {
    "vocab_size": 199, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.5,
}  # fmt: skip
MINISTRAL = {**SIZES, "architectures": ["Ministral3ForCausalLM"], "rope_parameters": YARN}
MISTRAL_4 = {
    **SIZES, "architectures": ["Mistral4ForCausalLM"], "rope_parameters": YARN, "kv_lora_rank": 16, "v_head_dim": 12,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}  # fmt: skip


def test_factor_grows_with_each_length_and_is_1_before_the_first() -> None:
    factors = query_factors(0.5, 4, 13, torch.float32).flatten()
    expected = [1.0] * 4 + [1 + 0.5 * math.log(2)] * 4 + [1 + 0.5 * math.log(3)] * 4 + [1 + 0.5 * math.log(4)]
    assert factors.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("architecture", "beta", "length"),
    [("Ministral3ForCausalLM", 0.1, 16_384), ("Mistral4ForCausalLM", 0.1, 8192)],
)
def test_file_without_rope_has_the_familys(architecture: str, beta: float, length: int) -> None:
    config = {key: value for key, value in MISTRAL_4.items() if key != "rope_parameters"}
    rope = spec_from_config({**config, "architectures": [architecture]}).layers[0].attention.rope
    assert rope is not None
    assert rope.query_scale == (beta, length)
    assert rope.kind == "yarn"


@pytest.mark.parametrize(
    ("config", "changes", "key"),
    [
        (MINISTRAL, {"llama_4_scaling_beta": None}, "llama_4_scaling_beta is null"),
        (MISTRAL_4, {"original_max_position_embeddings": -3}, "original_max_position_embeddings = -3"),
        (MISTRAL_4, {"partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25"),
        (MISTRAL_4, {"rope_type": "default"}, "rope_type = 'default'"),
    ],
)
def test_rope_that_makes_no_sense_is_named(config: dict[str, Any], changes: dict[str, Any], key: str) -> None:
    with pytest.raises(QuireError, match=key):
        spec_from_config({**config, "rope_parameters": {**YARN, **changes}})


@pytest.mark.parametrize(
    ("architecture", "changes", "keys"),
    [
        ("GraniteMoeHybridForCausalLM", {"mamba_expand": 3}, ("mamba_expand", "hidden_size")),
        ("FalconH1ForCausalLM", {"mamba_d_ssm": 1000}, ("mamba_d_ssm",)),
    ],
)
def test_sizes_of_mamba_that_differ_name_both_keys(
    architecture: str, changes: dict[str, Any], keys: tuple[str, ...]
) -> None:
    config = {**SIZES, "architectures": [architecture], "mamba_n_heads": 4, "mamba_d_head": 12, **changes}
    with pytest.raises(QuireError, match="mamba_d_head") as error:
        spec_from_config(config)
    assert all(key in str(error.value) for key in ("mamba_n_heads", *keys))
