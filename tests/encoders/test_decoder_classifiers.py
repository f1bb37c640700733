"""Decoders that classify by the last row: as transformers does, and the same bits however a text is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.encoders.tiny import SIZES, save_tokenizer, texts
from transformers import PreTrainedModel

from quire import LLM
from quire.errors import ModelLoadError, RequestError
from quire.executor.classifier import scores_of
from quire.models.checkpoint import read_json

pytestmark = pytest.mark.component

KINDS = ("Qwen3", "Llama")
SMALL = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "max_position_embeddings": 256}


def save(kind: str, folder: Path, **more: Any) -> PreTrainedModel:
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**SMALL, **more)
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_pairs_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = save(kind, tmp_path, num_labels=1)
    llm = LLM(str(tmp_path), threads=1, max_num_batched_tokens=32)
    queries, documents = texts(8, seed=8, longest=20), texts(8, seed=9, longest=30)
    together = [output.outputs.score for output in llm.score(queries, documents, use_tqdm=False)]
    for query, document, score in zip(queries, documents, together, strict=True):
        ids, _ = llm.get_tokenizer().encode_pair(query, document)
        with torch.no_grad():
            wanted = torch.sigmoid(model(torch.tensor([ids])).logits[0, 0])
        assert abs(score - wanted.item()) <= 2e-6
        assert llm.score(query, document, use_tqdm=False)[0].outputs.score == score
    assert len(set(together)) == len(together)
    with pytest.raises(RequestError, match="is a classifier, which writes no text"):
        llm.generate("cat", use_tqdm=False)
    llm.close()


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    save("Qwen3", tmp_path, num_labels=2)
    config = read_json(tmp_path / "config.json")
    labels = {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    (tmp_path / "config.json").write_text(json.dumps({**config, **labels}))
    with pytest.raises(ModelLoadError, match=r"score\.weight is \[2, 48\]"):
        LLM(str(tmp_path), threads=1)


def test_scores_of_logits() -> None:
    logits = np.array([1.0, -800.0, 3.0])
    assert scores_of(logits, "identity") is logits
    assert scores_of(logits, "sigmoid") == pytest.approx([0.7310585786, 0.0, 0.9525741268])
    assert scores_of(logits, "softmax") == pytest.approx([0.1192029220, 0.0, 0.8807970780])
