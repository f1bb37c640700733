"""A tiny Qwen2.5-VL or Qwen3-VL with random weights and a tokenizer of bytes, made and saved by transformers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PATCH, MERGE, CONTEXT = 4, 2, 640
MIN_PIXELS, MAX_PIXELS = 24 * 24, 48 * 48
MEAN, STD = [0.5, 0.4, 0.6], [0.5, 0.3, 0.2]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
    "<|video_pad|>",
]


def make_tokenizer(folder: Path) -> dict[str, int]:
    """Write tokenizer.json and its configuration; return the ids of the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return {text: tokenizer.token_to_id(text) for text in _SPECIAL}


def make_model(folder: Path, kind: str) -> Any:
    """Write a whole model folder and return the transformers model. ``kind``: Qwen3VL or Qwen2_5_VL."""
    ids, is_qwen3 = make_tokenizer(folder), kind == "Qwen3VL"
    text: dict[str, Any] = {
        "vocab_size": 320, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": CONTEXT,
        "bos_token_id": None, "eos_token_id": ids["<|im_end|>"], "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2] if is_qwen3 else [2, 3, 3],
        },
    }  # fmt: skip
    vision: dict[str, Any] = {
        "depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 48,
        "patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2,
    }  # fmt: skip
    if is_qwen3:
        text |= {"head_dim": 16}
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]}
    else:
        vision |= {"window_size": 2 * MERGE * PATCH, "fullatt_block_indexes": [1]}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"], tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    name = f"{kind}ForConditionalGeneration"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, name)(config).eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                # The default of biases is zero and that of norms is one: a loader could drop them unseen.
                is_norm = parameter.dim() == 1 and parameter_name.endswith("weight")
                parameter.normal_(1.0 if is_norm else 0.0, 0.3)
        model.save_pretrained(folder)
    processing = {
        "image_processor_type": "Qwen2VLImageProcessorFast", "image_mean": MEAN, "image_std": STD,
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}, "patch_size": PATCH,
        "merge_size": MERGE, "temporal_patch_size": 2,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processing))
    return model
