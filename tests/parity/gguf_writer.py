"""Write a loaded model as GGUF the way llama.cpp's converter does, so that two readers can be compared.

From the canonical weights and the ModelSpec: rows of q and k pairwise for architecture llama, 1 added to Gemma's norms,
fused projections for phi3.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch

from quire.modelspec import ModelSpec

_TOP = {"embed.weight": "token_embd", "norm.weight": "output_norm", "lm_head.weight": "output"}
_LAYER = {
    "attn_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "attn_post_norm": "post_attention_norm",
    "mlp_post_norm": "post_ffw_norm",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.o": "attn_output",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}


Encode = Callable[[np.ndarray, gguf.GGMLQuantizationType], np.ndarray]
TypeOf = Callable[[str, tuple[int, ...]], gguf.GGMLQuantizationType | None]


def write_gguf(
    path: Path,
    arch: str,
    spec: ModelSpec,
    weights: dict[str, torch.Tensor],
    *,
    type_of: TypeOf = lambda name, shape: None,
    encode: Encode = gguf.quants.quantize,
) -> Path:
    """``type_of(name, shape)``: what a tensor is quantized to, by ``encode``; None leaves it as it is."""
    writer = gguf.GGUFWriter(path, arch)
    _metadata(writer, spec)
    for name, tensor in _renamed(arch, spec, weights).items():
        array = np.ascontiguousarray(tensor.numpy())
        kind = type_of(name, array.shape)
        if kind is None:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, encode(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    attention = spec.layers[-1].attention
    assert attention.rope is not None
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.layers[0].mlp.intermediate_size)
    writer.add_head_count(attention.num_heads)
    writer.add_head_count_kv(attention.num_kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    # The global layers' base frequency: Gemma 3 has its other one fixed in the code of every reader.
    writer.add_rope_freq_base(
        max(x.attention.rope.theta for x in spec.layers if x.attention.rope is not None)
    )
    writer.add_rope_dimension_count(attention.rope.dim)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i}" for i in range(spec.vocab_size)])
    windows = [layer.attention.window for layer in spec.layers if layer.attention.window is not None]
    if windows:
        writer.add_sliding_window(windows[0])
    if attention.soft_cap is not None:
        writer.add_attn_logit_softcapping(attention.soft_cap)
    if spec.logits_soft_cap is not None:
        writer.add_final_logit_softcapping(spec.logits_soft_cap)


def _renamed(arch: str, spec: ModelSpec, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if name in _TOP:
            found[f"{_TOP[name]}.weight"] = tensor + spec.norm_plus_one if name == "norm.weight" else tensor
            continue
        _, index, rest = name.split(".", 2)
        part, kind = rest.rsplit(".", 1)
        if part.endswith("norm"):
            tensor = tensor + float(spec.norm_plus_one)
        if arch == "llama" and part in ("attn.q", "attn.k"):
            a = spec.layers[int(index)].attention
            tensor = _pairwise(tensor, a.num_heads if part == "attn.q" else a.num_kv_heads)
        found[f"blk.{index}.{_LAYER[part]}.{kind}"] = tensor
    if arch == "phi3":
        for i in range(spec.num_layers):
            fused = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_gate", "ffn_up")}
            for target, parts in fused.items():
                joined = torch.cat([found.pop(f"blk.{i}.{part}.weight") for part in parts])
                found[f"blk.{i}.{target}.weight"] = joined
    return found


def _pairwise(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows (i, i + dim / 2) of each head side by side."""
    half = tensor.shape[0] // heads // 2
    first, second = tensor.view(heads, 2, half, -1).unbind(1)
    return torch.stack((first, second), dim=2).reshape(tensor.shape)
