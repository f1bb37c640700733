"""Write a checkpoint of the Llama or Qwen3 architecture as a bf16 GGUF file, which llama.cpp loads and quantizes.

    python benchmarks/peers/gguf_checkpoint.py /tmp/models/llama-1b /tmp/peers/models/llama-1b.bf16.gguf

Tensor names, metadata keys and the interleaved order of rotary pairs are those of the GGUF specification.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3"}
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary settings; checkpoints of before transformers 5 have the base alone."""
    return dict(config.get("rope_parameters") or {"rope_theta": config["rope_theta"]})


def add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope_of(config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def add_vocabulary(writer: gguf.GGUFWriter, source: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    text = {number: token for token, number in (tokenizer["model"]["vocab"] | special).items()}
    tokens = [text.get(number, f"<pad{number}>") for number in range(config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_token_types([kinds[token in special] for token in tokens])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    end = config["eos_token_id"]
    writer.add_eos_token_id(end[0] if isinstance(end, list) else end)
    writer.add_add_bos_token(False)


def llama3_factors(rope: dict[str, Any], head_dim: int) -> torch.Tensor:
    """Return what each rotary frequency is divided by (Llama 3.1 scaling, `rope_freqs.weight`), ``[head_dim / 2]``."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    frequencies = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).float()


def interleave(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rotary pairs (i, i + dim/2) of each head → (2i, 2i + 1), the order of GGUF's llama architecture."""
    heads = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return heads.swapaxes(1, 2).reshape(weight.shape)


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor) -> None:
    if tensor.ndim == 1:
        writer.add_tensor(name, tensor.float().numpy())
        return
    raw = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def add_weights(writer: gguf.GGUFWriter, source: Path, config: dict[str, Any]) -> None:
    plain = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not config["tie_word_embeddings"]:
        plain["lm_head.weight"] = "output.weight"
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name in plain:
            add_tensor(writer, plain[name], tensor)
        elif name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            part = rest.removesuffix(".weight")
            if config["model_type"] == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
                tensor = interleave(tensor, heads[part[10]])
            add_tensor(writer, f"blk.{layer}.{LAYER_NAMES[part]}.weight", tensor)


def convert(source: Path, target: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(target, ARCHITECTURES[config["model_type"]])
    writer.add_name(source.name)
    add_shape(writer, config)
    add_vocabulary(writer, source, config)
    rope = rope_of(config)
    if rope.get("rope_type") == "llama3":
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        add_tensor(writer, "rope_freqs.weight", llama3_factors(rope, head_dim))
    add_weights(writer, source, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    given = parser.parse_args()
    convert(given.source, given.target)
    print(given.target)


if __name__ == "__main__":
    main()
