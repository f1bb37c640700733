"""Models by name, as the keys of their published ``config.json`` that decide shapes; read through `quire.families`.

Each preset answers to its own name and to hub ids that differ only in what does not change a shape ("-Instruct",
"-hf", "-FP8" …), so that planning needs no network.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.families import spec_from_config
from quire.modelspec import ModelSpec

_LLAMA3_ROPE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
_YARN_DEEPSEEK = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip
_YARN_GPT_OSS = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
    "original_max_position_embeddings": 4096, "truncate": False,
}  # fmt: skip
# Endings of hub ids that name a tuning or a quantization of the same shapes.
_SAME_SHAPES = re.compile(
    r"-(instruct|chat|hf|it|base|fp8|nvfp4|fp4|awq|gptq|int4|int8|bf16|thinking|\d{4}|v\d+(\.\d+)?)$"
)


def _config(
    architecture: str, layers: int, hidden: int, inter: int, heads: int, kv: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": [architecture], "num_hidden_layers": layers, "hidden_size": hidden,
        "intermediate_size": inter, "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab,
        "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5, **more,
    }  # fmt: skip


def _llama(layers: int, hidden: int, inter: int, heads: int, kv: int, **more: Any) -> dict[str, Any]:
    base = {"rope_theta": 500000.0, "max_position_embeddings": 131072, "rope_scaling": _LLAMA3_ROPE}
    return _config("LlamaForCausalLM", layers, hidden, inter, heads, kv, 128256, **base | more)


def _qwen3(layers: int, hidden: int, inter: int, heads: int, *, tied: bool = False) -> dict[str, Any]:
    return _config("Qwen3ForCausalLM", layers, hidden, inter, heads, 8, 151936, head_dim=128, rope_theta=1e6,
                   max_position_embeddings=40960, use_sliding_window=False, tie_word_embeddings=tied)  # fmt: skip


def _qwen3_moe(layers: int, hidden: int, inter: int, heads: int, kv: int, experts: int) -> dict[str, Any]:
    return _config("Qwen3MoeForCausalLM", layers, hidden, 3 * inter, heads, kv, 151936, head_dim=128, rope_theta=1e6,
                   max_position_embeddings=262144, num_experts=experts, num_experts_per_tok=8,
                   moe_intermediate_size=inter, norm_topk_prob=True, mlp_only_layers=[], decoder_sparse_step=1,
                   use_sliding_window=False)  # fmt: skip


def _mixtral(layers: int, hidden: int, inter: int, heads: int, vocab: int, positions: int) -> dict[str, Any]:
    return _config("MixtralForCausalLM", layers, hidden, inter, heads, 8, vocab, rope_theta=1e6,
                   max_position_embeddings=positions, num_local_experts=8, num_experts_per_tok=2)  # fmt: skip


def _deepseek_v3(heads: int, experts: int, dense: int, vocab: int, groups: int) -> dict[str, Any]:
    return _config("DeepseekV3ForCausalLM", 61, 7168, 18432, heads, heads, vocab, rope_theta=10000,
                   max_position_embeddings=163840, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
                   qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=experts, n_shared_experts=1,
                   num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=dense, moe_layer_freq=1,
                   n_group=groups, topk_group=max(1, groups // 2), topk_method="noaux_tc", scoring_func="sigmoid",
                   norm_topk_prob=True, routed_scaling_factor=2.5, num_nextn_predict_layers=1,
                   rope_scaling=_YARN_DEEPSEEK, rms_norm_eps=1e-6)  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _config("GptOssForCausalLM", layers, 2880, 2880, 64, 8, 201088, head_dim=64, rope_theta=150000,
                   max_position_embeddings=131072, initial_context_length=4096, sliding_window=128,
                   num_local_experts=experts, num_experts_per_tok=4, experts_per_token=4, attention_bias=True,
                   swiglu_limit=7.0, hidden_act="silu", 
                   layer_types=["sliding_attention", "full_attention"] * (layers // 2),
                   rope_scaling=_YARN_GPT_OSS)  # fmt: skip


_LLAMA2 = {"rope_theta": 10000.0, "max_position_embeddings": 4096, "rope_scaling": None, "vocab_size": 32000,
           "torch_dtype": "float16"}  # fmt: skip
_LLAMA3 = {"rope_scaling": None, "max_position_embeddings": 8192}
_SMALL = {"rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0}, "tie_word_embeddings": True}

PRESETS: Mapping[str, dict[str, Any]] = {
    "llama-2-7b": _llama(32, 4096, 11008, 32, 32, **_LLAMA2),
    "llama-2-13b": _llama(40, 5120, 13824, 40, 40, **_LLAMA2),
    "llama-2-70b": _llama(80, 8192, 28672, 64, 8, **_LLAMA2),
    "llama-3-8b": _llama(32, 4096, 14336, 32, 8, **_LLAMA3),
    "llama-3-70b": _llama(80, 8192, 28672, 64, 8, **_LLAMA3),
    "llama-3.1-8b": _llama(32, 4096, 14336, 32, 8),
    "llama-3.1-70b": _llama(80, 8192, 28672, 64, 8),
    "llama-3.1-405b": _llama(126, 16384, 53248, 128, 8),
    "llama-3.2-1b": _llama(16, 2048, 8192, 32, 8, head_dim=64, **_SMALL),
    "llama-3.2-3b": _llama(28, 3072, 8192, 24, 8, head_dim=128, **_SMALL),
    "llama-3.3-70b": _llama(80, 8192, 28672, 64, 8),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 768, 32, 4, 128),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 1536, 64, 4, 128),
    "qwen3-coder-480b-a35b": _qwen3_moe(62, 6144, 2560, 96, 8, 160),
    "mixtral-8x7b": _mixtral(32, 4096, 14336, 32, 32000, 32768),
    "mixtral-8x22b": _mixtral(56, 6144, 16384, 48, 32768, 65536),
    "deepseek-v3": _deepseek_v3(128, 256, 3, 129280, 8),
    "deepseek-r1": _deepseek_v3(128, 256, 3, 129280, 8),
    "deepseek-v3.1": _deepseek_v3(128, 256, 3, 129280, 8),
    "kimi-k2": _deepseek_v3(64, 384, 1, 163840, 1),
    "kimi-k2.5": _deepseek_v3(64, 384, 1, 163840, 1),  # its text decoder
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}  # fmt: skip


def preset_of(model: str) -> str | None:
    """Return the name of the preset that a hub id or a name means, None where there is none."""
    name = model.rpartition("/")[2].lower().replace("meta-llama-", "llama-")
    while name not in PRESETS:
        shorter = _SAME_SHAPES.sub("", name)
        if shorter == name:
            return None
        name = shorter
    return name


def preset_spec(name: str) -> ModelSpec:
    """Return the `ModelSpec` of a preset."""
    return spec_from_config(PRESETS[name], f"preset {name}")
