"""GGUF files of other converters: keys, defaults, ends of a turn, and biases as llama.cpp's loader has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.models.test_gguf_file import write_gguf
from tests.models.tiny import model_config

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.families.gguf import config_from_gguf
from quire.families.rope import yarn_mscale
from quire.models.checkpoint import describe
from quire.models.loader import iter_weights
from quire.rope_spec import RopeSpec
from quire.text.gguf_vocab import end_ids, tokenizer_from_gguf_metadata

KEYS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.block_count": 2,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 64,
}
TENSORS = {"output.weight": None}


def config_of(**more: Any) -> dict[str, Any]:
    keys = {**KEYS, **{key.replace("__", "."): value for key, value in more.items()}}
    return config_from_gguf(keys, TENSORS, lambda name: None, "model.gguf")


def rope_of(folder: Path, **keys: Any) -> RopeSpec:
    def add(writer: gguf.GGUFWriter) -> None:
        for key, value in keys.items():
            name = f"llama.rope.{key.replace('__', '.')}"
            writer.add_string(name, value) if isinstance(value, str) else writer.add_float32(name, value)

    rope = describe(write_gguf(folder / "model.gguf", add=add)).spec.layers[0].attention.rope
    assert rope is not None
    return rope


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({"scale_linear": 2.0}, 2.0),
        ({"scaling__factor": 4.0}, 4.0),
        ({"scaling__factor": 4.0, "scale_linear": 2.0}, 4.0),
        ({"scaling__type": "linear"}, None),
        ({"scaling__factor": 0.0}, None),
        ({"scaling__type": "none", "scaling__factor": 4.0}, None),
    ],
)
def test_a_factor_without_a_type_is_linear(
    keys: dict[str, Any], factor: float | None, tmp_path: Path
) -> None:
    rope = rope_of(tmp_path, **keys)
    assert (rope.kind, rope.factor) == (("default", 1.0) if factor is None else ("linear", factor))


def test_yarn_takes_its_own_keys(tmp_path: Path) -> None:
    keys = {
        "scaling__type": "yarn",
        "scaling__factor": 4.0,
        "scaling__attn_factor": 0.5,
        "scaling__yarn_beta_fast": 8.0,
    }
    rope = rope_of(tmp_path, **keys)
    assert (rope.kind, rope.factor, rope.beta_fast, rope.beta_slow) == ("yarn", 4.0, 8.0, 1.0)
    assert rope.attention_factor == pytest.approx(0.5 * yarn_mscale(4.0))
    with pytest.raises(UnsupportedModelError, match=r"rope\.scaling\.yarn_log_multiplier = 0\.1"):
        rope_of(
            tmp_path,
            scaling__type="yarn",
            scaling__factor=4.0,
            scaling__yarn_log_multiplier=np.float32(0.1).item(),
        )


@pytest.mark.parametrize("key", ["attention__head_count", "attention__head_count_kv", "feed_forward_length"])
def test_equal_values_for_each_layer_are_one(key: str) -> None:
    name = f"llama.{key.replace('__', '.')}"
    assert config_of(**{f"llama__{key}": [KEYS[name]] * 2}) == config_of()
    for listed in ([KEYS[name], 2 * KEYS[name]], [KEYS[name]] * 3):
        with pytest.raises(ModelLoadError, match=name.removeprefix("llama.")):
            config_of(**{f"llama__{key}": listed})


@pytest.mark.parametrize("stored", [("q", "k", "v"), ("output",), ("k",), ()])
def test_each_bias_may_be_left_out(stored: tuple[str, ...], tmp_path: Path) -> None:
    sizes = {"q": 32, "k": 16, "v": 16, "output": 32}

    def add(writer: gguf.GGUFWriter) -> None:
        for name in stored:
            writer.add_tensor(f"blk.0.attn_{name}.bias", np.full(sizes[name], 3.0, dtype=np.float32))

    found = describe(write_gguf(tmp_path / "model.gguf", add=add))
    loaded = dict(iter_weights(model_config(found.path, found.spec), torch.float32))
    for name, size in sizes.items():
        bias = loaded.get(f"layers.0.attn.{name.replace('output', 'o')}.bias")
        assert bias is not None or not stored
        if isinstance(bias, torch.Tensor):
            assert bias.shape == (size,)
            assert bool((bias == (3.0 if name in stored else 0.0)).all())
    assert ("layers.1.attn.q.bias" in loaded) is bool(stored)


def vocabulary(kind: str, extra: list[str], **more: Any) -> dict[str, Any]:
    """Return metadata of a vocabulary of 300 tokens and ``extra`` behind them, all of them text."""
    tokens = [*(["<unk>", "<s>", "</s>"] if kind == "llama" else []), *map(chr, range(0x100, 0x300))][:300]
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": tokens + extra,
        "tokenizer.ggml.scores": [0.0] * (len(tokens) + len(extra)),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.token_type": [1] * (len(tokens) + len(extra)),
        "tokenizer.ggml.pre": "llama-bpe",
    }
    return {**KEYS, "llama.vocab_size": len(tokens) + len(extra), **keys, **more}


@pytest.mark.parametrize(
    "text", ["<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|eom_id|>"]
)
def test_the_end_of_a_turn_is_found_by_its_text(text: str) -> None:
    metadata = vocabulary("gpt2", [text], **{"tokenizer.ggml.eos_token_id": 2})
    assert end_ids(metadata) == (2, 300)
    tokenizer = tokenizer_from_gguf_metadata(metadata)
    assert tokenizer.eos_token_ids == (2, 300)
    assert tokenizer.decode([300]) == ""


def test_marks_between_parts_of_an_answer_do_not_end_it() -> None:
    harmony = vocabulary(
        "gpt2", ["<|end|>", "<|return|>", "<|call|>"], **{"tokenizer.ggml.eos_token_id": 301}
    )
    assert end_ids(harmony) == (301, 302)


def test_a_sentencepiece_vocabulary_has_llama_cpps_ids() -> None:
    metadata = vocabulary("llama", [])
    tokenizer = tokenizer_from_gguf_metadata(metadata)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.encode(chr(0x110))[0] == 1
    config = config_from_gguf(metadata, TENSORS, lambda name: None, "model.gguf")
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    beyond = {**metadata, "tokenizer.ggml.bos_token_id": 4_000_000_000}
    assert tokenizer_from_gguf_metadata(beyond).bos_token_id == 1
    plain = config_from_gguf(vocabulary("gpt2", []), TENSORS, lambda name: None, "model.gguf")
    assert (plain["bos_token_id"], plain["eos_token_id"]) == (None, None)


def test_gemma_2_has_its_caps_and_its_window_without_keys() -> None:
    keys = {key.replace("llama.", "gemma2."): value for key, value in KEYS.items()} | {
        "general.architecture": "gemma2"
    }
    config = config_from_gguf(keys, {}, lambda name: None, "model.gguf")
    assert [
        config[key] for key in ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")
    ] == [
        50.0,
        30.0,
        4096,
    ]
