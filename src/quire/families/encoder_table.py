"""Families whose rows see each other both ways (`quire.encoder_spec`), as `quire.families` has those of decoders."""

from __future__ import annotations

from quire.families.shape import Fields

# Family → the architecture in config.json, and the module that has it.
ENCODERS = {
    "bert": ("BertModel", "bert"),
    "bert_classifier": ("BertForSequenceClassification", "bert"),
    "xlm_roberta": ("XLMRobertaModel", "roberta"),
    "xlm_roberta_classifier": ("XLMRobertaForSequenceClassification", "roberta"),
    "mpnet": ("MPNetModel", "roberta"),
    "distilbert": ("DistilBertModel", "bert"),
    "distilbert_classifier": ("DistilBertForSequenceClassification", "bert"),
    "modernbert": ("ModernBertModel", "modernbert"),
    "modernbert_classifier": ("ModernBertForSequenceClassification", "modernbert"),
    "jina_embeddings_v3": ("JinaEmbeddingsV3Model", "rotary_encoders"),
    "nomic_bert": ("NomicBertModel", "rotary_encoders"),
    "gte": ("GteModel", "rotary_encoders"),
    "gte_classifier": ("GteForSequenceClassification", "rotary_encoders"),
    "new": ("NewModel", "rotary_encoders"),
    "new_classifier": ("NewForSequenceClassification", "rotary_encoders"),
    "embedding_gemma": ("Gemma3TextModel", "both_ways"),
    "eurobert": ("EuroBertModel", "both_ways"),
}
# Other names of these: the same layers, or heads of training that no vector needs.
_OTHER_NAMES = {
    "RobertaModel": "xlm_roberta",
    "RobertaForSequenceClassification": "xlm_roberta_classifier",
    "CamembertModel": "xlm_roberta",
    "CamembertForSequenceClassification": "xlm_roberta_classifier",
    "BertForMaskedLM": "bert",
    "RobertaForMaskedLM": "xlm_roberta",
    "XLMRobertaForMaskedLM": "xlm_roberta",
    "CamembertForMaskedLM": "xlm_roberta",
    "MPNetForMaskedLM": "mpnet",
    "DistilBertForMaskedLM": "distilbert",
    "ModernBertForMaskedLM": "modernbert",
    "NomicBertForMaskedLM": "nomic_bert",
    "EuroBertForMaskedLM": "eurobert",
}
# Decoders with a classifier of the last row in place of an output matrix, and their families.
DECODER_CLASSIFIERS = {
    f"{name}ForSequenceClassification": family
    for name, family in (
        ("Llama", "llama"), ("Mistral", "mistral"), ("Qwen2", "qwen2"), ("Qwen3", "qwen3"), ("Gemma2", "gemma2"),
    )
}  # fmt: skip
# model_type in config.json → family, where they differ.
_MODEL_TYPES = {"xlm-roberta": "xlm_roberta", "roberta": "xlm_roberta", "camembert": "xlm_roberta"}
BY_ARCHITECTURE = (
    {architecture: name for name, (architecture, _) in ENCODERS.items()} | _OTHER_NAMES | DECODER_CLASSIFIERS
)


def named(f: Fields, by_type: str | None) -> tuple[str | None, str | None]:
    """Return the families by ``architectures`` and by ``model_type``; None: no encoder, or as given in ``by_type``.

    A Gemma 3 is an encoder only where its configuration says that rows see each other.
    """
    if by_type == "gemma3":
        if f.values.get("use_bidirectional_attention") is True:
            return "embedding_gemma", None
        return None, by_type
    names, model_type = f.items("architectures"), f.values.get("model_type")
    by_name = next((BY_ARCHITECTURE[name] for name in names if name in BY_ARCHITECTURE), None)
    if isinstance(model_type, str) and by_type is None:
        by_type = _MODEL_TYPES.get(model_type, model_type)
        by_type = by_type if by_type in ENCODERS and model_type not in _MODEL_TYPES.values() else None
    return by_name, by_type
