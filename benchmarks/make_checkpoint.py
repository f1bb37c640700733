"""Write a random-weight checkpoint of a real architecture, for benchmarks: the shapes and bytes of the real one.

    python benchmarks/make_checkpoint.py llama-1b --out /tmp/models

The tokenizer is a byte-level BPE trained on Python's standard library and padded to the vocabulary's size, so that
text goes in and out; what the model says means nothing.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Lfm2Config,
    LlamaConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
ARCHITECTURES = {
    "llama-1b": LlamaConfig(
        vocab_size=128256, hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, intermediate_size=8192, max_position_embeddings=131072, tie_word_embeddings=True,
        rms_norm_eps=1e-5, rope_parameters=LLAMA3_ROPE,
    ),
    "qwen3-0.6b": Qwen3Config(
        vocab_size=151936, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, intermediate_size=3072, max_position_embeddings=40960, tie_word_embeddings=True,
        rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    # Layers of Qwen3-30B-A3B, with a quarter of its experts.
    "qwen3-moe-4x32": Qwen3MoeConfig(
        vocab_size=32000, hidden_size=2048, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, moe_intermediate_size=768, num_experts=32, num_experts_per_tok=8, norm_topk_prob=True,
        max_position_embeddings=40960, tie_word_embeddings=False, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "smol-135m": LlamaConfig(
        vocab_size=49152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        head_dim=64, intermediate_size=1536, max_position_embeddings=8192, tie_word_embeddings=True,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    ),
    # Three recurrent layers before each that attends, as in Qwen3.5; a state has the bytes of the KV of 880 tokens.
    "qwen3.5-tiny": Qwen3_5TextConfig(
        vocab_size=16384, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=1,
        head_dim=64, intermediate_size=512, max_position_embeddings=40960, tie_word_embeddings=True,
        linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
    ),
    "qwen3.5-0.8b": Qwen3_5TextConfig(
        vocab_size=248320, hidden_size=1024, num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=2,
        head_dim=256, intermediate_size=3584, max_position_embeddings=40960, tie_word_embeddings=True,
        linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
    ),
    "lfm2-350m": Lfm2Config(
        vocab_size=65536, hidden_size=1024, intermediate_size=6656, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=8, full_attn_idxs=[2, 5, 8, 10, 12, 14], conv_L_cache=3, max_position_embeddings=40960,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
}  # fmt: skip


def write_tokenizer(folder: Path, vocab_size: int) -> int:
    """Write tokenizer.json and its config; return the id of the end token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    files = sorted(str(p) for p in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:150]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train(
        files, trainers.BpeTrainer(vocab_size=16000, show_progress=False, initial_alphabet=alphabet)
    )
    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    for number in range(len(vocabulary), vocab_size - 1):
        vocabulary[f"<unused{number}>"] = number
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    end = tokenizer.token_to_id("<|end|>")
    assert end is not None
    return int(end)


def make(name: str, out: Path, seed: int = 0) -> Path:
    """Write the checkpoint ``name`` under ``out`` unless it is there; return its folder."""
    folder = out / name
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = ARCHITECTURES[name]
    config.eos_token_id = write_tokenizer(folder, config.vocab_size)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=sorted(ARCHITECTURES))
    parser.add_argument("--out", type=Path, default=Path("/tmp/models"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(make(given.name, given.out, given.seed))


if __name__ == "__main__":
    main()
