"""GGUF against transformers' own GGUF reader, for every architecture that Quire reads."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.parity.families import CONTEXT, make
from tests.parity.gguf_hybrid_writer import without_factors
from tests.parity.gguf_writer import write_gguf
from tests.parity.harness import check
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from quire.config import ModelConfig
from quire.families.gguf import ARCHITECTURES
from quire.models.checkpoint import describe
from quire.models.loader import iter_weights

_EQUAL_MSCALE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "mscale": 0.707, "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 32,
}  # fmt: skip
# Case → (architecture, what the tiny case changes: GGUF has no key for some choices, and readers fix those).
CHANGES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"use_sliding_window": False, "sliding_window": None}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 16, "rope_parameters": None}),
    "gemma4": ("gemma4", {}),
    "gemma4_large": ("gemma4", {}),
    "phi3": ("phi3", {"rope_parameters": {"partial_rotary_factor": 1.0}}),
    "granite": ("granite", {}),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4}),
    "mixtral": ("llama", {"sliding_window": None}),
    "qwen2_moe": ("qwen2moe", {}),
    "qwen3_moe": ("qwen3moe", {}),
    "gpt_oss": ("gpt-oss", {}),
    "deepseek_v2": ("deepseek2", {"rope_parameters": _EQUAL_MSCALE}),
    "deepseek_v2_lite": ("deepseek2", {}),
    "deepseek_v3": ("deepseek2", {}),
    "seed_oss": ("seed_oss", {}),
    "exaone4": ("exaone4", {}),
    "exaone4_full": ("exaone4", {}),
    "ernie4_5": ("ernie4_5", {}),
    "glm4": ("glm4", {}),
    "apertus": ("apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    "glm4_moe": ("glm4moe", {}),
    "minimax_m2": ("minimax-m2", {}),
    "lfm2": ("lfm2", {"conv_bias": False}),
    "lfm2_moe": ("lfm2moe", {}),
    "granitemoehybrid": ("granitehybrid", {}),
    "granitemoehybrid_dense": ("granitehybrid", {"mamba_proj_bias": False}),
    "nemotron_h": ("nemotron_h_moe", {}),
    "nemotron_h_dense": ("nemotron_h", {}),
    "nemotron_h_latent": ("nemotron_h_moe", {"use_bias": False}),
    "qwen3_5": ("qwen35", {}),
    "qwen3_5_moe": ("qwen35moe", {}),
    "qwen3_next": ("qwen3next", {}),
    "falcon_h1": ("falcon-h1", {"mamba_norm_before_gate": False}),
    "falcon_h1_plain": ("falcon-h1", {}),
}
READ_BY_TRANSFORMERS = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")


def test_every_architecture_has_a_case() -> None:
    assert {arch for arch, _ in CHANGES.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("case", CHANGES)
def test_architecture(case: str, tmp_path: Path) -> None:
    arch, changes = CHANGES[case]
    original = make(case, tmp_path / "hf", **changes)
    found = describe(tmp_path / "hf")
    spec = found.spec
    model = ModelConfig(str(found.path), case, spec, "float32", "float32", CONTEXT)
    (tmp_path / "gguf").mkdir()
    weights = dict(iter_weights(model, torch.float32))
    if arch == "falcon-h1":
        spec, weights = without_factors(spec, weights)
    path = write_gguf(tmp_path / "gguf" / "model.gguf", arch, spec, weights)
    read = describe(path).spec
    assert read == replace(
        spec, norm_plus_one=False, bos_token_id=read.bos_token_id, eos_token_ids=read.eos_token_ids
    )
    oracle = read_by_transformers(path, original) if case in READ_BY_TRANSFORMERS else original
    check(path, oracle, CONTEXT)


def read_by_transformers(path: Path, original: PreTrainedModel) -> PreTrainedModel:
    """The tensors of the file as transformers' GGUF reader returns them, in a model of the original configuration.

    Its reading of the metadata is no oracle: it takes head_dim, the scale of Gemma and the padding id from defaults.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(
            original.config, attn_implementation="eager", dtype=torch.float32
        )
        tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()
