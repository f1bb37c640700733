"""A tiny Gemma 3 with random weights and a tokenizer of bytes, made and saved by transformers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EDGE, CONTEXT, NUM_TOKENS = 32, 640, 16
# As that of Gemma 3, which writes the mark of an image and not its token.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content | trim }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% elif part.type == 'text' %}{{ part.text | trim }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_SPECIAL = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<image_soft_token>",
            "<end_of_image>"]  # fmt: skip


def make_tokenizer(folder: Path) -> dict[str, int]:
    """Write tokenizer.json and its configuration; return the ids of the special tokens.

    Line breaks that stand together are one token, as Gemma's are.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    line = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("\n")[0][0]
    vocab |= {line * 2: len(vocab), line * 3: len(vocab) + 1}
    tokenizer = Tokenizer(models.BPE(vocab, [(line, line), (line * 2, line)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>",
        "chat_template": TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return {text: tokenizer.token_to_id(text) for text in _SPECIAL}


def make_model(folder: Path) -> Any:
    """Write a whole model folder and return the transformers model."""
    ids = make_tokenizer(folder)
    text: dict[str, Any] = {
        "vocab_size": 320, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "query_pre_attn_scalar": 16,
        "max_position_embeddings": CONTEXT, "sliding_window": 24, "sliding_window_pattern": 2,
        "bos_token_id": ids["<bos>"], "eos_token_id": ids["<eos>"], "pad_token_id": 0,
    }  # fmt: skip
    vision: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": EDGE, "patch_size": 4, "vision_use_head": False,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=NUM_TOKENS,
        image_token_index=ids["<image_soft_token>"], boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
    )  # fmt: skip
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.Gemma3ForConditionalGeneration(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # The default of biases is zero and that of norms is one: a loader could drop them unseen. The norms
                # of the decoder and of the projector add one to their weights.
                is_norm = parameter.dim() == 1 and name.endswith("weight") and "vision_tower" in name
                parameter.normal_(1.0 if is_norm else 0.0, 0.05 if "embed_tokens" in name else 0.3)
        model.save_pretrained(folder)
    processing = {
        "image_processor_type": "Gemma3ImageProcessor", "size": {"height": EDGE, "width": EDGE},
        "image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.3, 0.2], "resample": 2, "image_seq_length": NUM_TOKENS,
        "do_pan_and_scan": None,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processing))
    return model
