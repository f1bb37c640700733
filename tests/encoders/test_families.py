"""Every family of encoders against transformers in float32, and pairs of texts through classifiers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.encoders.tiny import save_family, texts

from quire import LLM
from quire.errors import UnsupportedModelError
from quire.families import ENCODERS, spec_from_config
from quire.models.checkpoint import read_json

pytestmark = pytest.mark.component

VECTORS = ["xlm_roberta", "mpnet"]
CLASSIFIERS = ["bert_classifier", "xlm_roberta_classifier"]


@pytest.mark.parametrize("kind", VECTORS)
def test_vectors_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = save_family(kind, tmp_path)
    llm = LLM(str(tmp_path), threads=1)
    prompts = texts(30, seed=7)
    together = [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
    for text, vector in zip(prompts, together, strict=True):
        with torch.no_grad():
            rows = model(torch.tensor([llm.get_tokenizer().encode(text)])).last_hidden_state[0]
        wanted = torch.nn.functional.normalize(rows.mean(0), dim=0)
        assert (torch.tensor(vector) - wanted).abs().max() <= 2e-6
        assert llm.embed([text], use_tqdm=False)[0].outputs.embedding == vector
    llm.close()


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_scores_of_pairs_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = save_family(kind, tmp_path)
    llm = LLM(str(tmp_path), threads=1)
    tokenizer = llm.get_tokenizer()
    pairs = list(zip(texts(20, seed=8, longest=20), texts(20, seed=9, longest=30), strict=True))
    queries, documents = map(list, zip(*pairs, strict=True))
    together = [output.outputs.score for output in llm.score(queries, documents, use_tqdm=False)]
    for pair, score in zip(pairs, together, strict=True):
        ids, second = tokenizer.encode_pair(*pair)
        types = torch.tensor([[int(i >= second) for i in range(len(ids))]])
        more = {"token_type_ids": types} if kind == "bert_classifier" else {}
        with torch.no_grad():
            wanted = torch.sigmoid(model(torch.tensor([ids]), **more).logits[0, 0])
        assert abs(score - wanted.item()) <= 2e-6
        assert llm.score(*pair, use_tqdm=False)[0].outputs.score == score
    assert len(set(together)) == len(together)
    llm.close()


@pytest.mark.parametrize(
    "said",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
)
def test_scores_are_logits_where_the_files_say_so(said: dict[str, Any], tmp_path: Path) -> None:
    save_family("bert_classifier", tmp_path)
    config = read_json(tmp_path / "config.json")
    scores = {}
    for name, more in (("sigmoid", {}), ("identity", said)):
        (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
        llm = LLM(str(tmp_path), threads=1)
        scores[name] = llm.score("some words", "more words", use_tqdm=False)[0].outputs.score
        llm.close()
    assert scores["sigmoid"] == pytest.approx(1 / (1 + math.exp(-scores["identity"])))
    spec = {**config, "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Softmax"}}
    with pytest.raises(UnsupportedModelError, match=r"Softmax.* is not supported"):
        spec_from_config(spec)


def test_every_encoder_has_a_case(tmp_path: Path) -> None:
    made = {"BertModel"}
    for kind in (*VECTORS, *CLASSIFIERS):
        save_family(kind, tmp_path / kind)
        made.add(spec_from_config(read_json(tmp_path / kind / "config.json")).architecture)
    assert made == set(ENCODERS)
