"""A small byte-level tokenizer on disk: tokenizer.json, tokenizer_config.json and a template, within 199 ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BOS,
    "eos_token": EOS,
    "pad_token": PAD,
    "add_bos_token": True,
    "add_eos_token": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 256,
    "padding_side": "left",
    "added_tokens_decoder": {
        "0": {"content": PAD, "special": True},
        "1": {"content": BOS, "special": True},
        "2": {"content": EOS, "special": True},
        "3": {"content": "<tool>", "special": False, "normalized": False},
    },
    "chat_template": "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
}
MERGES = [
    ("a", "b"),
    ("ab", "c"),
    ("Ġ", "a"),
    ("Ġ", "ab"),
    ("Ġa", "b"),
    ("t", "h"),
    ("th", "e"),
    ("Ġ", "the"),
]
_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGH0123456789.,!?'[]<>/_|-ĠĊ" + "Ã©ä¸Ń"


def write_tokenizer(folder: Path, **changes: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json with ``changes``; return the folder."""
    specials = [PAD, BOS, EOS, "<tool>"]
    vocab = {text: index for index, text in enumerate(dict.fromkeys([*specials, *_ALPHABET]))}
    for left, right in MERGES:
        vocab.setdefault(left + right, len(vocab))
    assert len(vocab) <= 199, len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=text != "<tool>", normalized=False) for text in specials])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, vocab[BOS])]
    )
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, **changes}, indent=1))
    return folder
