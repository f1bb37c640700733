"""Sparse encoders (SPLADE) of every family that has a head of masked tokens, against transformers in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.encoders.tiny import save_family, save_sparse_files, texts
from transformers import PreTrainedModel

from quire import LLM
from quire.errors import RequestError, UnsupportedModelError
from quire.families.vocabulary_heads import STORED
from quire.models.checkpoint import read_json

pytestmark = pytest.mark.component


def expected(model: PreTrainedModel, ids: list[int], strategy: str, *, twice: bool) -> torch.Tensor:
    with torch.no_grad():
        weights = torch.log1p(torch.relu(model(torch.tensor([ids])).logits[0]))
    weights = torch.log1p(weights) if twice else weights
    return weights.amax(0) if strategy == "max" else weights.sum(0)


def dense(weights: dict[int, float], size: int) -> torch.Tensor:
    found = torch.zeros(size)
    found[list(weights)] = torch.tensor(list(weights.values()))
    return found


def check(
    folder: Path, model: PreTrainedModel, strategy: str = "max", *, twice: bool = False, **more: Any
) -> None:
    llm = LLM(str(folder), threads=1, **more)
    prompts = [*texts(12, seed=7), " ".join(["a b c d e f g"] * 10)]
    together = llm.embed_sparse(prompts, use_tqdm=False)
    for text, weights in zip(prompts, together, strict=True):
        wanted = expected(model, llm.get_tokenizer().encode(text), strategy, twice=twice)
        assert (dense(weights, len(wanted)) - wanted).abs().max() <= 1e-5 * wanted.max()
        assert min(weights.values()) > 0.0
        assert list(weights) == sorted(weights)
        assert llm.embed_sparse(text, use_tqdm=False) == [weights]
    llm.close()


@pytest.mark.parametrize("kind", sorted(STORED))
def test_weights_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = save_family(f"{kind}_masked", tmp_path)
    save_sparse_files(tmp_path)
    check(tmp_path, model)


def test_each_way_of_the_files(tmp_path: Path) -> None:
    """Sums over rows, two logarithms, an output matrix of its own, and names of TensorFlow."""
    model = save_family("bert_masked", tmp_path)
    save_sparse_files(tmp_path, "sum", "log1p_relu", transformer="MLMTransformer")
    check(tmp_path, model, "sum", twice=True)
    stored = load_file(tmp_path / "model.safetensors")
    for name in [name for name in stored if "LayerNorm" in name]:
        new = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        stored[new] = stored.pop(name)
    save_file(stored, tmp_path / "model.safetensors")
    check(tmp_path, model, "sum", twice=True)
    own = torch.randn(model.config.vocab_size, model.config.hidden_size)
    save_file({**stored, "cls.predictions.decoder.weight": own}, tmp_path / "model.safetensors")
    check(tmp_path, model, "sum", twice=True)
    config = read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    model.get_output_embeddings().weight = torch.nn.Parameter(own)
    check(tmp_path, model, "sum", twice=True)


def test_what_a_sparse_encoder_does_not_do_is_refused(tmp_path: Path) -> None:
    save_family("bert_masked", tmp_path)
    save_sparse_files(tmp_path)
    llm = LLM(str(tmp_path), threads=1, quantize="int8", dtype="bfloat16")
    assert llm.embed_sparse("cat", use_tqdm=False)[0]
    with pytest.raises(RequestError, match="gives sparse vectors"):
        llm.embed("cat", use_tqdm=False)
    with pytest.raises(RequestError, match="sparse vectors \\(/embed_sparse\\)"):
        llm.generate("cat", use_tqdm=False)
    llm.close()
    save_sparse_files(tmp_path, "mean")
    with pytest.raises(UnsupportedModelError, match="pooling_strategy"):
        LLM(str(tmp_path))
    save_family("gte", tmp_path)
    save_sparse_files(tmp_path)
    with pytest.raises(UnsupportedModelError, match="head of masked tokens"):
        LLM(str(tmp_path))
