"""Every family of encoders against transformers in float32, and pairs of texts through classifiers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.encoders.tiny import CLASSES, SIZES, save_family, texts

from quire import LLM
from quire.errors import UnsupportedModelError
from quire.families import spec_from_config
from quire.families.encoder_table import ENCODERS
from quire.kernels.registry import backends
from quire.layers.rope import inverse_frequencies
from quire.models.checkpoint import read_json

pytestmark = pytest.mark.component

VECTORS = [kind for kind in CLASSES if kind != "bert"]
CLASSIFIERS = [
    f"{kind}_classifier" for kind in ("bert", "xlm_roberta", "roberta", "distilbert", "modernbert", "gte")
]


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


@pytest.mark.parametrize("level", backends("linear"))
@pytest.mark.parametrize("kind", ["modernbert", "embedding_gemma", "gte"])
def test_a_text_alone_has_the_bits_it_has_in_a_batch(kind: str, level: str, tmp_path: Path) -> None:
    save_family(kind, tmp_path)
    llm = LLM(str(tmp_path), threads=2, cpu_isa=level, dtype="bfloat16")
    prompts = texts(12, seed=11)
    together = [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
    assert [llm.embed([text], use_tqdm=False)[0].outputs.embedding for text in prompts] == together
    llm.close()


def test_files_of_own_code_are_those_of_transformers(tmp_path: Path) -> None:
    """GTE and NomicBERT came with code of their own, which had other keys and names than transformers has now."""
    for kind, new_keys in (("gte", NEW), ("nomic_bert", NOMIC)):
        model = save_family(kind, tmp_path)
        expected = _vectors(tmp_path)
        save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
        assert _vectors(tmp_path) == expected
        model.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(new_keys))
        assert _vectors(tmp_path) == expected


def _vectors(folder: Path) -> list[list[float]]:
    llm = LLM(str(folder), threads=1)
    found = [output.outputs.embedding for output in llm.embed(texts(3), use_tqdm=False)]
    llm.close()
    return found


NEW = {
    **SIZES, "architectures": ["NewModel"], "model_type": "new", "rope_theta": 50.0, "type_vocab_size": 1,
    "hidden_act": "gelu", "pack_qkv": True, "layer_norm_type": "layer_norm", "position_embedding_type": "rope",
}  # fmt: skip
NOMIC = {
    "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": SIZES["vocab_size"], "n_embd": 48,
    "n_inner": 72, "n_layer": 3, "n_head": 4, "n_positions": 80, "activation_function": "swiglu",
    "rotary_emb_base": 50.0, "rotary_emb_fraction": 1.0, "qkv_proj_bias": False, "layer_norm_epsilon": 1e-12,
    "type_vocab_size": 2,
}  # fmt: skip


def test_stretched_positions_of_gte_are_those_of_its_code() -> None:
    spec = spec_from_config({**NEW, "rope_scaling": {"type": "ntk", "factor": 8.0}})
    assert spec.encoder is not None
    rope = spec.encoder.layers[0].rope
    assert rope is not None
    found = inverse_frequencies(rope, 80)
    exponents = torch.arange(0, 12, 2) / 12
    assert torch.allclose(found, 1.0 / (50.0 * 8.0) ** exponents / 8.0 ** (2 / 12), rtol=1e-6)
    with pytest.raises(UnsupportedModelError, match="logn_attention_scale"):
        spec_from_config({**NEW, "logn_attention_scale": True})
    with pytest.raises(UnsupportedModelError, match="moe_every_n_layers"):
        spec_from_config({**NOMIC, "moe_every_n_layers": 2})


def test_a_gemma_that_sees_the_past_alone_stays_a_decoder(tmp_path: Path) -> None:
    save_family("embedding_gemma", tmp_path)
    config = read_json(tmp_path / "config.json")
    assert spec_from_config(config).encoder is not None
    assert spec_from_config({**config, "use_bidirectional_attention": False}).encoder is None


def test_every_encoder_has_a_case(tmp_path: Path) -> None:
    made = {"BertModel", "NewModel", "NewForSequenceClassification"}
    for kind in (*VECTORS, *CLASSIFIERS):
        save_family(kind, tmp_path / kind)
        made.add(spec_from_config(read_json(tmp_path / kind / "config.json")).architecture)
    assert made == {architecture for architecture, _ in ENCODERS.values()}
