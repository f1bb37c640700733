"""GGUF against transformers' own GGUF reader, for every architecture that Quire reads."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.parity.families import CONTEXT, make
from tests.parity.gguf_writer import write_gguf
from tests.parity.harness import check
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from quire.config import ModelConfig
from quire.families.gguf import ARCHITECTURES
from quire.models.checkpoint import describe
from quire.models.loader import iter_weights

# Architecture → what the tiny case changes: GGUF has no key for some choices, and readers fix those.
CHANGES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": False, "sliding_window": None},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16, "rope_parameters": None},
    "phi3": {"rope_parameters": {"partial_rotary_factor": 1.0}},
}


def test_every_architecture_has_a_case() -> None:
    assert set(CHANGES) == set(ARCHITECTURES)


@pytest.mark.parametrize("arch", CHANGES)
def test_architecture(arch: str, tmp_path: Path) -> None:
    original = make(arch, tmp_path / "hf", **CHANGES[arch])
    found = describe(tmp_path / "hf")
    spec = found.spec
    model = ModelConfig(str(found.path), arch, spec, "float32", "float32", CONTEXT)
    (tmp_path / "gguf").mkdir()
    path = write_gguf(tmp_path / "gguf" / "model.gguf", arch, spec, dict(iter_weights(model, torch.float32)))
    read = describe(path).spec
    assert read == replace(
        spec, norm_plus_one=False, bos_token_id=read.bos_token_id, eos_token_ids=read.eos_token_ids
    )
    check(path, read_by_transformers(path, original), CONTEXT)


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
