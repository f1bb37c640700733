"""Write a loaded model as GGUF the way llama.cpp's converter does, so that two readers can be compared.

From the canonical weights and the ModelSpec: rows of q and k pairwise for architecture llama and its like, 1 added to
Gemma's norms, fused projections for phi3, MLA's kv_b in two halves.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from tests.parity.gguf_delta_writer import delta_tensors
from tests.parity.gguf_gemma4_writer import gemma4_metadata
from tests.parity.gguf_hybrid_writer import hybrid_metadata, recurrent_tensors

from quire.families.gguf_delta import DELTA
from quire.families.gguf_hybrids import HYBRIDS
from quire.modelspec import ModelSpec, MoeSpec

_TOP = {
    "embed.weight": "token_embd",
    "norm.weight": "output_norm",
    "lm_head.weight": "output",
    "per_layer.table.weight": "per_layer_token_embd",
    "per_layer.projection.weight": "per_layer_model_proj",
    "per_layer.norm.weight": "per_layer_proj_norm",
}
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
    "attn.q_a": "attn_q_a",
    "attn.q_a_norm": "attn_q_a_norm",
    "attn.q_b": "attn_q_b",
    "attn.kv_a": "attn_kv_a_mqa",
    "attn.kv_a_norm": "attn_kv_a_norm",
    "per_layer.gate": "inp_gate",
    "per_layer.out": "proj",
    "per_layer.norm": "post_norm",
    "moe.router": "ffn_gate_inp",
    "moe.latent_in": "ffn_latent_down",
    "moe.latent_out": "ffn_latent_up",
    "moe.shared_gate": "ffn_gate_inp_shexp",
    **{f"moe.{name}": f"ffn_{name}_exps" for name in ("gate", "up", "down")},
    **{f"moe.shared.{name}": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
}
_WHOLE = {
    "per_layer.scale": "layer_output_scale.weight",
    "moe.correction_bias": "exp_probs_b.bias",
    "attn.sinks": "attn_sinks.weight",
}
_NORM_BEFORE_MLP = ("gpt-oss", "seed_oss", "glm4moe", *DELTA)
_PAIRWISE = ("llama", "granite", "smollm3", "granitehybrid", "nemotron_h", "nemotron_h_moe")


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
    _metadata_of_some(writer, arch, spec)
    if arch == "apertus":
        _xielu(writer, spec, weights)
    if arch == "gemma4":
        gemma4_metadata(writer, spec)
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
    attention = spec.attentions[-1]
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    dense = next((layer for layer in spec.layers if layer.mlp.moe is None), spec.layers[0])
    writer.add_feed_forward_length(dense.mlp.intermediate_size)
    writer.add_head_count(attention.num_heads)
    writer.add_head_count_kv(attention.num_kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    # The global layers' base frequency: Gemma 3 has its other one fixed in the code of every reader.
    ropes = [each.rope for each in spec.attentions if each.rope is not None]
    if ropes:
        writer.add_rope_freq_base(max(rope.theta for rope in ropes))
        writer.add_rope_dimension_count(ropes[-1].dim)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i}" for i in range(spec.vocab_size)])
    windows = [each.window for each in spec.attentions if each.window is not None]
    if windows:
        writer.add_sliding_window(windows[0])
    if windows and writer.arch == "exaone4":
        writer.add_sliding_window_pattern([each.window is not None for each in spec.attentions])
    if attention.soft_cap is not None:
        writer.add_attn_logit_softcapping(attention.soft_cap)
    if spec.logits_soft_cap is not None:
        writer.add_final_logit_softcapping(spec.logits_soft_cap)


def _metadata_of_some(writer: gguf.GGUFWriter, arch: str, spec: ModelSpec) -> None:
    """Keys of experts, of Granite's multipliers, of latent attention and of YaRN."""
    attention, layer = spec.attentions[-1], spec.layers[-1]
    if arch in HYBRIDS:
        hybrid_metadata(writer, arch, spec)
        return
    if arch == "granite":
        writer.add_attention_scale(attention.scale)
        writer.add_embedding_scale(spec.embedding_scale)
        writer.add_residual_scale(spec.residual_scale)
        writer.add_logit_scale(1 / spec.logits_scale)
    moe = layer.mlp.moe
    if moe is not None:
        writer.add_expert_count(moe.num_experts)
        writer.add_expert_used_count(moe.top_k)
        writer.add_expert_feed_forward_length(moe.intermediate_size)
        if arch == "qwen2moe":
            writer.add_expert_shared_feed_forward_length(moe.shared_intermediate_size)
    rope = attention.rope
    if rope is not None and rope.kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope.factor)
        writer.add_rope_scaling_orig_ctx_len(rope.original_max_position)
    if moe is None or (moe.scoring != "sigmoid" and not attention.is_mla):
        return
    if attention.is_mla:
        if attention.q_lora_rank:
            writer.add_q_lora_rank(attention.q_lora_rank)
        writer.add_kv_lora_rank(attention.kv_lora_rank)
        writer.add_key_length_mla(attention.head_dim)
        writer.add_value_length_mla(attention.v_head_dim)
    _routing_of(writer, spec, moe)


def _routing_of(writer: gguf.GGUFWriter, spec: ModelSpec, moe: MoeSpec) -> None:
    """Keys of DeepSeek's, GLM's and MiniMax's experts."""
    rope = spec.attentions[-1].rope
    writer.add_leading_dense_block_count(sum(each.mlp.moe is None for each in spec.layers))
    writer.add_expert_shared_count(moe.shared_intermediate_size // moe.intermediate_size)
    writer.add_expert_weights_scale(moe.routed_scale)
    writer.add_expert_weights_norm(moe.normalize_topk)
    writer.add_expert_gating_func(
        gguf.ExpertGatingFuncType.SIGMOID if moe.scoring == "sigmoid" else gguf.ExpertGatingFuncType.SOFTMAX
    )
    if moe.num_groups > 1:
        writer.add_expert_group_count(moe.num_groups)
        writer.add_expert_group_used_count(moe.topk_groups)
    if rope is not None and rope.kind == "yarn":
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope.mscale_all_dim)


def _xielu(writer: gguf.GGUFWriter, spec: ModelSpec, weights: dict[str, torch.Tensor]) -> None:
    """What each layer's activation has learned, and its constants as bfloat16 rounds them."""
    for sign, add in (("p", writer.add_xielu_alpha_p), ("n", writer.add_xielu_alpha_n)):
        add([float(weights[f"layers.{i}.mlp.alpha_{sign}"]) for i in range(spec.num_layers)])
    writer.add_xielu_beta([0.5] * spec.num_layers)
    writer.add_xielu_eps([-9.98e-7] * spec.num_layers)


def _halves(prefix: str, tensor: torch.Tensor, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """The rows of each head's keys, transposed, and those of its values."""
    a = spec.layers[0].attention
    keys, values = tensor.view(a.num_heads, -1, a.kv_lora_rank).split(
        (a.qk_nope_head_dim, a.v_head_dim), dim=1
    )
    return {f"{prefix}attn_k_b.weight": keys.transpose(1, 2), f"{prefix}attn_v_b.weight": values}


def _renamed(arch: str, spec: ModelSpec, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if name in _TOP:
            top = "token_embd_norm" if arch in ("lfm2", "lfm2moe") and name == "norm.weight" else _TOP[name]
            found[f"{top}.weight"] = tensor + spec.norm_plus_one if name == "norm.weight" else tensor
            continue
        _, index, rest = name.split(".", 2)
        if rest.startswith(("mamba.", "conv.", "delta.", "mlp.alpha_")) or rest == "attn.gate.weight":
            continue
        if rest in _WHOLE:
            found[f"blk.{index}.{_WHOLE[rest]}"] = tensor
            continue
        if rest == "attn.kv_b.weight":
            found |= _halves(f"blk.{index}.", tensor, spec)
            continue
        part, kind = rest.rsplit(".", 1)
        if part.endswith("norm"):
            tensor = tensor + float(spec.norm_plus_one)
        if arch in _PAIRWISE and part in ("attn.q", "attn.k"):
            a = spec.layers[int(index)].attention
            tensor = _pairwise(tensor, a.num_heads if part == "attn.q" else a.num_kv_heads)
        target = "post_attention_norm" if arch in _NORM_BEFORE_MLP and part == "mlp_norm" else _LAYER[part]
        target = "attn_norm" if arch.startswith("nemotron") and part == "mlp_norm" else target
        found[f"blk.{index}.{target}.{kind}"] = tensor
    if arch == "falcon-h1":
        for i in range(spec.num_layers):
            found[f"blk.{i}.ffn_norm"] = found.pop(f"blk.{i}.ffn_norm.weight")
    if arch == "gemma4":
        rope = spec.attentions[-1].rope
        assert rope is not None
        turning = int(rope.dim // 2 * rope.part)
        factors = [1.0] * turning + [1e30] * (rope.dim // 2 - turning)
        found["rope_freqs.weight"] = torch.tensor(factors)
    if arch in DELTA:
        found |= delta_tensors(spec, weights)
    elif arch in HYBRIDS:
        found |= recurrent_tensors(spec, weights)
    if arch in ("phi3", "glm4"):
        for i in range(spec.num_layers):
            fused = {"attn_qkv": ("attn_q", "attn_k", "attn_v")} if arch == "phi3" else {}
            fused["ffn_up"] = ("ffn_gate", "ffn_up")
            for target, parts in fused.items():
                joined = torch.cat([found.pop(f"blk.{i}.{part}.weight") for part in parts])
                found[f"blk.{i}.{target}.weight"] = joined
    return found


def _pairwise(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows (i, i + dim / 2) of each head side by side."""
    half = tensor.shape[0] // heads // 2
    first, second = tensor.view(heads, 2, half, -1).unbind(1)
    return torch.stack((first, second), dim=2).reshape(tensor.shape)
