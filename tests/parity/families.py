"""Tiny configurations of every family, made and saved by transformers with weights of standard deviation 0.3.

Windows of 16, contexts of 256, at least three layers: every kind of layer occurs, and prompts are longer than the
window and than the original length of the rotary embedding.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

STD = 0.3
WINDOW = 16
CONTEXT = 256

_SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": STD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DEEPSEEK_MOE: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
_MLA: dict[str, Any] = {
    **_DEEPSEEK_MOE,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_expand": 1,
}
_NEMOTRON: dict[str, Any] = {
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 8,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}
# Kimi Linear and Ling 3.
_KDA: dict[str, Any] = {
    **{key: value for key, value in _MLA.items() if key not in ("n_routed_experts", "first_k_dense_replace")},
    "num_local_experts": 8,
    "first_k_dense_replace": 1,
}
# transformers 5.24 has the decoder, and not where `AutoModelForCausalLM` looks.
AutoModelForCausalLM.register(transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True)
_SCALED: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.7,
}
_ALTERNATE = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

# case → (transformers' configuration class, what differs from _SIZES)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_bias_tied": (
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 16},
    ),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2Config",
        {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 12},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 7,
            "head_dim": 16,
            "num_key_value_heads": 1,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 12,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 7,
            "head_dim": 16,
            "global_head_dim": 32,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2
            + ["full_attention"],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 199,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma4_large": (
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 6,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": WINDOW,
            "hidden_size_per_layer_input": 0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4_experts": (
        "Gemma4TextConfig",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": WINDOW,
            "hidden_size_per_layer_input": 0,
            "tie_word_embeddings": False,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": WINDOW, "rope_parameters": {"partial_rotary_factor": 0.5}}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": (
        "Olmo3Config",
        {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "attention_factor": 1.2,
                    "original_max_position_embeddings": 32,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "exaone4": (
        "Exaone4Config",
        {"num_hidden_layers": 4, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    ),
    "exaone4_full": ("Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 16, "use_bias": True}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16, "attention_out_bias": True}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {**_DEEPSEEK_MOE, "use_qk_norm": True, "attention_bias": True, "head_dim": 16},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {**_MLA, "mlp_layer_types": ["dense", "sparse", "sparse"], "rms_norm_eps": 1e-5},
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        },
    ),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1Config",
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "ministral3": ("Ministral3Config", {"head_dim": 16, "rope_parameters": _SCALED}),
    "mistral4": (
        "Mistral4Config",
        {**_MLA, "rope_parameters": {**_SCALED, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 5, "no_rope_layer_interval": 2}),
    "apertus": (
        "ApertusConfig",
        {
            "attention_bias": True,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e5,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": WINDOW, "head_dim": 12}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**_MOE, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_MOE, "head_dim": 16, "norm_topk_prob": True, "decoder_sparse_step": 1},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", _HYBRID),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**_HYBRID, **_MOE, "shared_expert_intermediate_size": 40}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **_HYBRID,
            **_MOE,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8, "conv_bias": True},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {**_MOE, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    ),
    "lfm3": (
        "Lfm3Config",
        {
            "num_hidden_layers": 5,
            "layer_types": ["conv", "full_attention", "sliding_attention", "conv", "sliding_attention"],
            "head_dim": 16,
            "sliding_window": WINDOW,
            "conv_L_cache": 5,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **_MAMBA,
            "num_local_experts": 6,
            "intermediate_size": 24,
            "shared_intermediate_size": 40,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "granitemoehybrid_dense": (
        "GraniteMoeHybridConfig",
        {
            **_MAMBA,
            "num_local_experts": 0,
            "shared_intermediate_size": 40,
            "attention_multiplier": 0.3,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **_NEMOTRON,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "nemotron_h_dense": (
        "NemotronHConfig",
        {**_NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
    ),
    "nemotron_h_latent": (
        "NemotronHConfig",
        {
            **_NEMOTRON,
            "layers_block_type": ["linear_attention", "full_attention", "moe"],
            "n_groups": 1,
            "use_bias": True,
            "moe_latent_size": 32,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            **_MAMBA,
            "mamba_d_ssm": 40,
            "mamba_d_head": 10,
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "mlp_multipliers": [0.7, 1.4],
            "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.6],
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.6,
            "attention_in_multiplier": 0.9,
            "attention_out_multiplier": 1.5,
            "key_multiplier": 0.7,
            "lm_head_multiplier": 0.5,
            "embedding_multiplier": 2.0,
        },
    ),
    "falcon_h1_plain": ("FalconH1Config", {**_MAMBA, "mamba_d_ssm": 48, "mlp_bias": True}),
    "cohere": ("CohereConfig", {"logit_scale": 0.3, "attention_bias": True, "tie_word_embeddings": False}),
    "cohere2": (
        "Cohere2Config",
        {"num_hidden_layers": 4, "sliding_window": WINDOW, "logit_scale": 0.3, "layer_types": _ALTERNATE},
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **_KDA,
            "q_lora_rank": None,
            "linear_num_heads": 3,
            "linear_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "bailing_hybrid": ("BailingHybridConfig", {**_KDA, "layer_group_size": 2, "head_dim": 12}),
    "bailing_hybrid_plain": (
        "BailingHybridConfig",
        {**_KDA, "q_lora_rank": None, "kda_safe_gate": False, "layer_group_size": 3},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATE,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            **_MLA,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "mscale": 0.707,
                "mscale_all_dim": 0.9,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "deepseek_v2_lite": (
        "DeepseekV2Config",
        {**_MLA, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_MLA,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
}

ORIGINAL = 32  # positions before the rotary embedding is stretched
_PAIRS = 6
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 8.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL},
    "yarn_factor": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": ORIGINAL,
        "attention_factor": 1.3,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.05 * i for i in range(_PAIRS)],
        "long_factor": [1.0 + 0.7 * i for i in range(_PAIRS)],
        "original_max_position_embeddings": ORIGINAL,
    },
}


def fix_rope(model: PreTrainedModel, max_model_len: int) -> None:
    """Fix the frequencies that transformers would choose anew for every length to those for ``max_model_len``."""
    rotary = model.model.rotary_emb
    frequencies, rotary.attention_scaling = ROPE_INIT_FUNCTIONS[rotary.rope_type](
        model.config, torch.device("cpu"), seq_len=max_model_len
    )
    rotary.inv_freq.copy_(frequencies)
    rotary.rope_type = "default"  # what decides whether forward() recomputes them


def make(case: str, folder: Path, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Build the tiny model of ``case``, save it under ``folder`` and return it, ready to compare with."""
    kind, extra = CASES[case]
    config = getattr(transformers, kind)(**{**_SIZES, **extra, **changes})
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns of odd sizes, and of its own deprecations
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        _fill(model, seed)
        save(model, folder)
    return model.eval()


def make_seeing(case: str, kind: str, folder: Path) -> PreTrainedModel:
    """Build a tiny ``kind``ForConditionalGeneration with the decoder of ``case`` and a tower, and save it."""
    name, extra = CASES[case]
    text = getattr(transformers, name)(**{**_SIZES, **extra})
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= (
        {"num_key_value_heads": 2, "head_dim": 8}
        if kind == "Gemma4"
        else {"image_size": 28, "patch_size": 14}
    )
    image: dict[str, int] = {}
    if kind == "Gemma3":  # whose encoder runs: its numbers must fit
        image = {"mm_tokens_per_image": 4, "image_token_index": 1, "boi_token_index": 2}
    config = getattr(transformers, f"{kind}Config")(text_config=text.to_dict(), vision_config=vision, **image)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float()
        _fill(model, 0)
        save(model, folder)
    assert isinstance(model, PreTrainedModel)
    return model.eval()


def rename(path: Path, part: str, other: str) -> None:
    """Rename the tensors of a safetensors file whose names begin with ``part``."""
    tensors = load_file(path)
    renamed = {n.replace(part, other, 1) if n.startswith(part) else n: t for n, t in tensors.items()}
    save_file(renamed, path, metadata={"format": "pt"})


def save(model: PreTrainedModel, folder: Path, *, shards: int = 1) -> None:
    """Save as one file, or as at least ``shards``."""
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, max_shard_size=size // shards if shards > 1 else size * 2)
    assert len(list(folder.glob("*.safetensors"))) >= shards


@torch.no_grad()
def _fill(model: PreTrainedModel, seed: int) -> None:
    """Give every tensor values: norms, biases and sinks too, which initialisation leaves at 0 or 1."""
    generator = torch.Generator().manual_seed(seed + 1)
    named = [*model.named_parameters(), *(b for b in model.named_buffers() if "correction_bias" in b[0])]
    for name, tensor in named:
        noise = torch.randn(tensor.shape, generator=generator) * STD
        # In Gemma a norm's weight of 1 means a factor of 2: the blocks then outweigh the scaled embedding, and greedy
        # text does not repeat one token.
        tensor.copy_(noise + 1.0 if name.endswith("norm.weight") else noise)
