"""A tiny BERT with weights of standard deviation 0.3, made by transformers, and the files of sentence-transformers."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedModel

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCAB = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), "cat", "dog", "query", ":"]
CONTEXT = 80
SIZES: dict[str, Any] = {
    "vocab_size": len(VOCAB),
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
}


def texts(count: int, seed: int = 0, longest: int = 60) -> list[str]:
    """Return texts of words, of one token and more."""
    rng = random.Random(seed)
    return [
        " ".join(rng.choice((*LETTERS, "cat", "dog")) for _ in range(rng.randint(1, longest)))
        for _ in range(count)
    ]


def save_bert(folder: Path) -> PreTrainedModel:
    """Write a BERT of odd sizes with its tokenizer and return it."""
    torch.manual_seed(1)
    model = BertModel(BertConfig(**SIZES)).eval()
    for name, weight in model.named_parameters():  # transformers begins norms at 1 and biases at 0
        if name.endswith("bias") or "LayerNorm" in name:
            torch.nn.init.normal_(weight, mean=float("LayerNorm.weight" in name), std=0.3)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """Write a WordPiece tokenizer, which cuts and pads as that of MiniLM does until it is told otherwise."""
    made = Tokenizer(models.WordPiece({token: i for i, token in enumerate(VOCAB)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.enable_truncation(8)
    made.enable_padding(length=16)
    made.add_special_tokens(SPECIAL)
    made.save(str(folder / "tokenizer.json"))
    roles = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **roles}))


def save_sentence_files(
    folder: Path, mode: str = "mean_tokens", *, normalize: bool = True, **more: Any
) -> None:
    """Write what sentence-transformers writes; ``more``: of config_sentence_transformers.json."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=False))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "max_tokens")}
    modes[f"pooling_mode_{mode}"] = True
    config = {"word_embedding_dimension": SIZES["hidden_size"], **modes}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 64, "do_lower_case": False})
    )
    (folder / "config_sentence_transformers.json").write_text(json.dumps(more))


def save_sparse_files(
    folder: Path, strategy: str = "max", activation: str = "relu", transformer: str = "Transformer"
) -> None:
    """Write what sentence-transformers writes of a SPLADE."""
    kinds = {"": f"models.{transformer}", "1_SpladePooling": "sparse_encoder.models.SpladePooling"}
    modules = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_SpladePooling").mkdir(exist_ok=True)
    config = {
        "pooling_strategy": strategy,
        "activation_function": activation,
        "word_embedding_dimension": None,
    }
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps(config))


# Kind → the name of its classes in transformers, and what its configuration has next to or instead of `SIZES`.
ROTARY: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "xlm_roberta": ("XLMRoberta", {}),
    "roberta": ("Roberta", {}),
    "mpnet": ("MPNet", {}),
    "distilbert": ("DistilBert", {"hidden_dim": 72}),
    "jina_embeddings_v3": ("JinaEmbeddingsV3", ROTARY),
    "nomic_bert": ("NomicBert", ROTARY),
    "gte": ("Gte", ROTARY),
    "eurobert": ("EuroBert", {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, **ROTARY}),
    "modernbert": (
        "ModernBert",
        {
            "num_hidden_layers": 4,
            "local_attention": 12,
            "norm_bias": True,
            "classifier_pooling": "mean",
            "pad_token_id": 0,
        },
    ),
    "embedding_gemma": (
        "Gemma3Text",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 12,
            "use_bidirectional_attention": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 24,
        },
    ),
}


def save_family(kind: str, folder: Path) -> PreTrainedModel:
    """Write a tiny encoder: a kind of `CLASSES`, maybe with "_classifier" (one label) or "_masked" after it."""
    torch.manual_seed(2)
    name, more = CLASSES[kind.removesuffix("_classifier").removesuffix("_masked")]
    ending, sizes = "ForMaskedLM" if kind.endswith("masked") else "Model", {**SIZES, **more}
    if kind.endswith("classifier"):
        ending, sizes = "ForSequenceClassification", {**sizes, "num_labels": 1}
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, name + ending)(config).eval()
    for key, weight in model.named_parameters():
        if key.endswith("bias") or "norm" in key.lower() or "relative" in key:
            is_factor = "norm" in key.lower() and key.endswith("weight") and name != "Gemma3Text"
            torch.nn.init.normal_(weight, mean=float(is_factor), std=0.3)
        elif weight.dim() > 1:  # some of transformers' own are too small for their errors to be seen
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


if __name__ == "__main__":  # two models for tests.clients
    into = Path(sys.argv[1])
    save_bert(into / "vectors")
    save_sentence_files(into / "vectors", prompts={"query": "query: ", "document": ""})
    save_family("bert_classifier", into / "ranks")
