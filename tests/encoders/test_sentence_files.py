"""Files of sentence-transformers next to encoders and decoders: Dense, prompts, the last token, yes and no."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.encoders.tiny import CONTEXT, SIZES, VOCAB, save_bert, save_sentence_files, save_tokenizer, texts
from tokenizers import Tokenizer, processors
from transformers import Qwen3Config, Qwen3ForCausalLM

from quire import LLM
from quire.errors import ModelLoadError, UnsupportedModelError
from quire.models.checkpoint import read_json

pytestmark = pytest.mark.component

HIDDEN = SIZES["hidden_size"]
TANH = "torch.nn.modules.activation.Tanh"


def save_dense(folder: Path, index: int, sizes: tuple[int, int], **more: Any) -> dict[str, torch.Tensor]:
    """Write a Dense into ``folder`` as part number ``index``, before Normalize, and return its weights."""
    modules = json.loads((folder / "modules.json").read_text())
    path = f"{index}_Dense"
    kind = "sentence_transformers.models.Dense"
    modules.insert(index, {"idx": index, "name": str(index), "path": path, "type": kind})
    (folder / "modules.json").write_text(json.dumps(modules))
    weights = {"linear.weight": torch.randn(sizes[1], sizes[0]) * 0.2}
    if more.get("bias", True):
        weights["linear.bias"] = torch.randn(sizes[1]) * 0.2
    (folder / path).mkdir(exist_ok=True)
    save_file(weights, folder / path / "model.safetensors")
    config = {"in_features": sizes[0], "out_features": sizes[1], "activation_function": TANH, **more}
    (folder / path / "config.json").write_text(json.dumps(config))
    return weights


def vectors(llm: LLM, prompts: list[str], **more: Any) -> list[list[float]]:
    return [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False, **more)]


def test_vectors_go_through_the_linears_of_their_files(tmp_path: Path) -> None:
    save_bert(tmp_path)
    save_sentence_files(tmp_path)
    plain = LLM(str(tmp_path), threads=1)
    prompts = texts(6, seed=4)
    rows = torch.tensor(vectors(plain, prompts, normalize=False))
    plain.close()
    first = save_dense(tmp_path, 2, (HIDDEN, 64))
    identity = "torch.nn.modules.linear.Identity"
    second = save_dense(tmp_path, 3, (64, 20), bias=False, activation_function=identity)
    wanted = torch.tanh(rows @ first["linear.weight"].T + first["linear.bias"]) @ second["linear.weight"].T
    llm = LLM(str(tmp_path), threads=1)
    found = vectors(llm, prompts)
    assert torch.allclose(torch.tensor(found), torch.nn.functional.normalize(wanted, dim=1), atol=2e-6)
    assert [vectors(llm, [text])[0] for text in prompts] == found
    cut = torch.tensor(vectors(llm, prompts, dimensions=8))
    assert torch.allclose(cut, torch.nn.functional.normalize(wanted[:, :8], dim=1), atol=2e-6)
    llm.close()
    (tmp_path / "3_Dense" / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"3_Dense.* is missing"):
        LLM(str(tmp_path), threads=1)
    config = read_json(tmp_path / "2_Dense" / "config.json")
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps({**config, "use_residual": True}))
    with pytest.raises(UnsupportedModelError, match="use_residual"):
        LLM(str(tmp_path), threads=1)


def save_qwen3(folder: Path) -> Qwen3ForCausalLM:
    """Write a Qwen3 whose tokenizer ends each text with [SEP], as Qwen3-Embedding's ends it with a mark."""
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=len(VOCAB), hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4 * CONTEXT, initializer_range=0.3,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [SEP]", pair="$A $B [SEP]", special_tokens=[("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def test_a_decoder_gives_the_vectors_of_its_files(tmp_path: Path) -> None:
    model = save_qwen3(tmp_path)
    prompts = {"query": "query: ", "document": ""}
    save_sentence_files(tmp_path, "lasttoken", prompts=prompts, default_prompt_name="query")
    llm = LLM(str(tmp_path), threads=1, dtype="float32", max_num_batched_tokens=16, block_size=4)
    asked = texts(8, seed=6, longest=40)
    found = vectors(llm, asked)
    for text, vector in zip(asked, found, strict=True):
        ids = llm.get_tokenizer().encode("query: " + text)
        assert ids[-1] == 3
        with torch.no_grad():
            last = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
        assert torch.allclose(torch.tensor(vector), torch.nn.functional.normalize(last, dim=0), atol=5e-6)
    assert vectors(llm, asked[:1]) == found[:1]
    assert llm.generate(asked[:1], use_tqdm=False)[0].outputs[0].token_ids
    llm.close()
    save_sentence_files(tmp_path, "cls_token")
    with pytest.raises(UnsupportedModelError, match="'cls' is not supported with a decoder"):
        LLM(str(tmp_path), threads=1)


def test_a_decoder_ranks_by_the_tokens_of_its_files(tmp_path: Path) -> None:
    model = save_qwen3(tmp_path)
    parts = ("Transformer", "LogitScore")
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.{kind}",
        }
        for i, kind in enumerate(parts)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_LogitScore").mkdir()
    tokens = {"true_token_id": 57, "false_token_id": 58}
    (tmp_path / "1_LogitScore" / "config.json").write_text(json.dumps(tokens))
    llm = LLM(str(tmp_path), threads=1, dtype="float32")
    output = llm.score("a b", "c d", use_tqdm=False)[0]
    with torch.no_grad():
        logits = model(torch.tensor([output.prompt_token_ids])).logits[0, -1]
    wanted = 1 / (1 + math.exp(logits[58] - logits[57]))
    assert output.outputs.score == pytest.approx(wanted, abs=1e-5)
    llm.close()
