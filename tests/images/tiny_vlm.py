"""A tiny SmolVLM with random weights and a tokenizer of bytes, made and saved by transformers; and images."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TILE, LONGEST, CONTEXT = 16, 48, 640
# That of SmolVLM-Instruct, which drops a text that is no part.
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_SPECIAL = ["<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>"]
_TILES = [f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6)]


def make_tokenizer(folder: Path) -> dict[str, int]:
    """Write tokenizer.json and its configuration; return the ids of the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in _SPECIAL + _TILES]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<end_of_utterance>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return {text: tokenizer.token_to_id(text) for text in _SPECIAL}


def make_model(folder: Path, kind: str = "SmolVLM", *, tied: bool = False, **changes: Any) -> Any:
    """Write a whole model folder and return the transformers model. ``kind``: SmolVLM or Idefics3."""
    ids = make_tokenizer(folder)
    text: dict[str, Any] = {
        "model_type": "llama", "vocab_size": 320, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
        "initializer_range": 0.3, "bos_token_id": ids["<|im_start|>"], "eos_token_id": ids["<end_of_utterance>"],
        "pad_token_id": 0, "tie_word_embeddings": tied,
    }  # fmt: skip
    vision: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": TILE, "patch_size": 4, "initializer_range": 0.3,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision | changes, scale_factor=2, image_token_id=ids["<image>"],
        pad_token_id=0, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # The default of biases is zero and that of norms is one: a loader could drop them unseen.
                is_norm = parameter.dim() == 1 and name.endswith("weight")
                parameter.normal_(1.0 if is_norm else 0.0, 0.3)
        model.save_pretrained(folder)
    processing = {
        "image_processor_type": f"{kind}ImageProcessor", "size": {"longest_edge": LONGEST},
        "max_image_size": {"longest_edge": TILE}, "image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.3, 0.2],
        "do_image_splitting": True, "resample": 1,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processing))
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": 4}))
    return model


def make_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an image with smooth areas and noise."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (4, 5, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noise = random.integers(-20, 21, smooth.shape)
    return Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8))
