"""Configurations as published on the hub (the keys that matter), with the number of weights of each model."""

from __future__ import annotations

from typing import Any

LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def _config(
    architecture: str, layers: int, hidden: int, inter: int, heads: int, kv: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "torch_dtype": "bfloat16",
        **more,
    }


# name → (config, number of weights)
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-2-7b": (  # the first release had no rope_theta
        _config("LlamaForCausalLM", 32, 4096, 11008, 32, 32, 32000, rms_norm_eps=1e-5, max_position_embeddings=4096,
                hidden_act="silu", tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, rope_scaling=None,
                torch_dtype="float16"),
        6_738_415_616,
    ),
    "Llama-3.1-8B": (
        _config("LlamaForCausalLM", 32, 4096, 14336, 32, 8, 128256, rms_norm_eps=1e-5, rope_theta=500000.0,
                max_position_embeddings=131072, rope_scaling=LLAMA3_ROPE, hidden_act="silu",
                eos_token_id=[128001, 128008, 128009], attention_bias=False, mlp_bias=False),
        8_030_261_248,
    ),
    "Llama-3.2-1B": (
        _config("LlamaForCausalLM", 16, 2048, 8192, 32, 8, 128256, rms_norm_eps=1e-5, rope_theta=500000.0,
                max_position_embeddings=131072, rope_scaling={**LLAMA3_ROPE, "factor": 32.0}, head_dim=64,
                tie_word_embeddings=True),
        1_235_814_400,
    ),
    "Mistral-7B-v0.1": (
        _config("MistralForCausalLM", 32, 4096, 14336, 32, 8, 32000, rms_norm_eps=1e-5, rope_theta=10000.0,
                max_position_embeddings=32768, sliding_window=4096),
        7_241_732_096,
    ),
    "Qwen2.5-0.5B": (
        _config("Qwen2ForCausalLM", 24, 896, 4864, 14, 2, 151936, rms_norm_eps=1e-6, rope_theta=1000000.0,
                max_position_embeddings=32768, sliding_window=32768, use_sliding_window=False, max_window_layers=24,
                tie_word_embeddings=True),
        494_032_768,
    ),
    "Qwen3-0.6B": (
        _config("Qwen3ForCausalLM", 28, 1024, 3072, 16, 8, 151936, head_dim=128, rms_norm_eps=1e-6,
                rope_theta=1000000, max_position_embeddings=40960, sliding_window=None, use_sliding_window=False,
                max_window_layers=28, attention_bias=False, tie_word_embeddings=True),
        596_049_920,
    ),
    "gemma-2-2b": (
        _config("Gemma2ForCausalLM", 26, 2304, 9216, 8, 4, 256000, head_dim=256, rms_norm_eps=1e-6,
                rope_theta=10000.0, max_position_embeddings=8192, sliding_window=4096, query_pre_attn_scalar=256,
                attn_logit_softcapping=50.0, final_logit_softcapping=30.0, hidden_act="gelu_pytorch_tanh",
                hidden_activation="gelu_pytorch_tanh", cache_implementation="hybrid"),
        2_614_341_888,
    ),
    "gemma-3-1b-it": (
        _config("Gemma3ForCausalLM", 26, 1152, 6912, 4, 1, 262144, head_dim=256, rms_norm_eps=1e-6,
                rope_theta=1000000, rope_local_base_freq=10000, rope_scaling=None, max_position_embeddings=32768,
                sliding_window=512, sliding_window_pattern=6, query_pre_attn_scalar=256,
                hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=None, eos_token_id=[1, 106]),
        999_885_952,
    ),
    "Phi-3-mini-128k": (
        _config("Phi3ForCausalLM", 32, 3072, 8192, 32, 32, 32064, rms_norm_eps=1e-5, rope_theta=10000.0,
                max_position_embeddings=131072, original_max_position_embeddings=4096, sliding_window=262144,
                rope_scaling={"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48}),
        3_821_079_552,
    ),
    "Phi-4-mini": (
        _config("Phi3ForCausalLM", 32, 3072, 8192, 24, 8, 200064, rms_norm_eps=1e-5, rope_theta=10000.0,
                max_position_embeddings=131072, original_max_position_embeddings=4096, sliding_window=262144,
                partial_rotary_factor=0.75, tie_word_embeddings=True,
                rope_scaling={"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48}),
        3_836_021_760,
    ),
    "OLMo-2-1124-7B": (
        _config("Olmo2ForCausalLM", 32, 4096, 11008, 32, 32, 100352, rms_norm_eps=1e-6, rope_theta=500000,
                max_position_embeddings=4096),
        7_298_617_344,
    ),
    "granite-3.1-2b": (
        _config("GraniteForCausalLM", 40, 2048, 8192, 32, 8, 49155, rms_norm_eps=1e-5, rope_theta=5000000.0,
                max_position_embeddings=131072, attention_multiplier=0.015625, embedding_multiplier=12.0,
                residual_multiplier=0.22, logits_scaling=8.0, tie_word_embeddings=True),
        2_533_531_648,
    ),
    "SmolLM3-3B": (
        _config("SmolLM3ForCausalLM", 36, 2048, 11008, 16, 4, 128256, rms_norm_eps=1e-6, rope_theta=5000000.0,
                max_position_embeddings=65536, no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9,
                use_sliding_window=False, sliding_window=None),
        3_075_098_624,
    ),
    "Mixtral-8x7B": (
        _config("MixtralForCausalLM", 32, 4096, 14336, 32, 8, 32000, rms_norm_eps=1e-5, rope_theta=1000000.0,
                max_position_embeddings=32768, sliding_window=None, num_local_experts=8, num_experts_per_tok=2),
        46_702_792_704,
    ),
    "Qwen1.5-MoE-A2.7B": (
        _config("Qwen2MoeForCausalLM", 24, 2048, 5632, 16, 16, 151936, rms_norm_eps=1e-6, rope_theta=1000000.0,
                max_position_embeddings=8192, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408,
                shared_expert_intermediate_size=5632, norm_topk_prob=False, decoder_sparse_step=1,
                sliding_window=32768, use_sliding_window=False, max_window_layers=21),
        14_315_784_192,
    ),
    "Qwen3-30B-A3B": (
        _config("Qwen3MoeForCausalLM", 48, 2048, 6144, 32, 4, 151936, head_dim=128, rms_norm_eps=1e-6,
                rope_theta=1000000.0, max_position_embeddings=40960, num_experts=128, num_experts_per_tok=8,
                moe_intermediate_size=768, norm_topk_prob=True, mlp_only_layers=[], decoder_sparse_step=1,
                use_sliding_window=False),
        30_532_122_624,
    ),
    "gpt-oss-20b": (  # as published, without the quantization
        _config("GptOssForCausalLM", 24, 2880, 2880, 64, 8, 201088, head_dim=64, rms_norm_eps=1e-5,
                rope_theta=150000, max_position_embeddings=131072, initial_context_length=4096, sliding_window=128,
                num_local_experts=32, num_experts_per_tok=4, experts_per_token=4, attention_bias=True,
                swiglu_limit=7.0, hidden_act="silu", eos_token_id=200002,
                layer_types=["sliding_attention", "full_attention"] * 12,
                rope_scaling={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                              "original_max_position_embeddings": 4096, "truncate": False}),
        20_914_757_184,
    ),
    "DeepSeek-V2-Lite": (
        _config("DeepseekV2ForCausalLM", 27, 2048, 10944, 16, 16, 102400, rms_norm_eps=1e-6, rope_theta=10000,
                max_position_embeddings=163840, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128,
                qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
                moe_intermediate_size=1408, first_k_dense_replace=1, moe_layer_freq=1, n_group=1, topk_group=1,
                topk_method="greedy", scoring_func="softmax", norm_topk_prob=False, routed_scaling_factor=1.0,
                rope_scaling={"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "type": "yarn",
                              "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}),
        15_706_484_224,
    ),
    "DeepSeek-V3": (  # without the quantization
        _config("DeepseekV3ForCausalLM", 61, 7168, 18432, 128, 128, 129280, rms_norm_eps=1e-6, rope_theta=10000,
                max_position_embeddings=163840, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
                qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=256, n_shared_experts=1,
                num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3, moe_layer_freq=1,
                n_group=8, topk_group=4, topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True,
                routed_scaling_factor=2.5, num_nextn_predict_layers=1,
                rope_scaling={"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                              "original_max_position_embeddings": 4096, "type": "yarn"}),
        671_026_419_200,
    ),
    "OLMo-3-7B": (
        _config("Olmo3ForCausalLM", 32, 4096, 11008, 32, 32, 100278, rms_norm_eps=1e-6, rope_theta=500000,
                max_position_embeddings=65536, sliding_window=4096, attention_bias=False,
                layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
                rope_scaling={"attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
                              "original_max_position_embeddings": 8192, "rope_type": "yarn"}),
        7_298_011_136,
    ),
    "EXAONE-4.0-32B": (
        _config("Exaone4ForCausalLM", 64, 5120, 27392, 40, 8, 102400, head_dim=128, rms_norm_eps=1e-5,
                rope_theta=1000000, max_position_embeddings=131072, sliding_window=4096,
                sliding_window_pattern="LLLG", layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 16,
                rope_scaling={**LLAMA3_ROPE, "factor": 16.0}),
        32_003_216_384,
    ),
    "EXAONE-4.0-1.2B": (
        _config("Exaone4ForCausalLM", 30, 2048, 4096, 32, 8, 102400, head_dim=64, rms_norm_eps=1e-5,
                rope_theta=1000000, max_position_embeddings=65536, sliding_window=None,
                sliding_window_pattern=None, tie_word_embeddings=True, layer_types=["full_attention"] * 30,
                rope_scaling={**LLAMA3_ROPE, "factor": 16.0}),
        1_279_391_488,
    ),
    "ERNIE-4.5-0.3B": (
        _config("Ernie4_5ForCausalLM", 18, 1024, 3072, 16, 2, 103424, head_dim=128, rms_norm_eps=1e-5,
                rope_theta=500000, max_position_embeddings=131072, use_bias=False, tie_word_embeddings=True),
        360_748_032,
    ),
    "Seed-OSS-36B": (
        _config("SeedOssForCausalLM", 64, 5120, 27648, 80, 8, 155136, head_dim=128, rms_norm_eps=1e-6,
                rope_theta=10000000.0, max_position_embeddings=524288, attention_bias=True, attention_out_bias=False,
                mlp_bias=False, rope_scaling={"rope_type": "default"}),
        36_151_104_512,
    ),
    "GLM-4-9B-0414": (
        _config("Glm4ForCausalLM", 40, 4096, 13696, 32, 2, 151552, head_dim=128, rms_norm_eps=1e-5, rope_theta=10000.0,
                max_position_embeddings=32768, attention_bias=True, partial_rotary_factor=0.5,
                eos_token_id=[151329, 151336, 151338]),
        9_400_279_040,
    ),
    "GLM-4.5-Air": (
        _config("Glm4MoeForCausalLM", 46, 4096, 10944, 96, 8, 151552, head_dim=128, rms_norm_eps=1e-5,
                rope_theta=1000000, max_position_embeddings=131072, attention_bias=True, partial_rotary_factor=0.5,
                use_qk_norm=False, n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8,
                moe_intermediate_size=1408, first_k_dense_replace=1, n_group=1, topk_group=1, norm_topk_prob=True,
                routed_scaling_factor=1.0, num_nextn_predict_layers=1),
        106_852_251_264,
    ),
    "GLM-4.7-Flash": (
        _config("Glm4MoeLiteForCausalLM", 47, 2048, 10240, 20, 20, 154880, rms_norm_eps=1e-5, rope_theta=1000000,
                max_position_embeddings=202752, attention_bias=False, partial_rotary_factor=1.0, q_lora_rank=768,
                kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, n_routed_experts=64,
                n_shared_experts=1, num_experts_per_tok=4, moe_intermediate_size=1536, first_k_dense_replace=1,
                n_group=1, topk_group=1, topk_method="noaux_tc", norm_topk_prob=True, routed_scaling_factor=1.8,
                num_nextn_predict_layers=1),
        29_943_393_920,
    ),
    "MiniMax-M2": (
        _config("MiniMaxM2ForCausalLM", 62, 3072, 1536, 48, 8, 200064, head_dim=128, rms_norm_eps=1e-6,
                rope_theta=5000000, rotary_dim=64, max_position_embeddings=196608, num_local_experts=256,
                num_experts_per_tok=8, use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid",
                shared_intermediate_size=0, attn_type_list=[1] * 62, use_mtp=True, num_mtp_modules=3),
        228_689_764_864,
    ),
    "Kimi-K2": (  # without the quantization; its model_type is "kimi_k2"
        _config("DeepseekV3ForCausalLM", 61, 7168, 18432, 64, 64, 163840, model_type="kimi_k2", rms_norm_eps=1e-6,
                rope_theta=50000.0, max_position_embeddings=131072, q_lora_rank=1536, kv_lora_rank=512,
                qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=384, n_shared_experts=1,
                num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=1, moe_layer_freq=1,
                n_group=1, topk_group=1, topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True,
                routed_scaling_factor=2.827, num_nextn_predict_layers=0,
                rope_scaling={"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0,
                              "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}),
        1_026_408_232_448,
    ),
    "gemma-4-E2B": (  # text_config of the published file
        _config("Gemma4ForCausalLM", 35, 1536, 6144, 8, 1, 262144, head_dim=256, global_head_dim=512, rms_norm_eps=1e-6,
                max_position_embeddings=131072, sliding_window=512, num_kv_shared_layers=20, use_double_wide_mlp=True,
                hidden_size_per_layer_input=256, vocab_size_per_layer_input=262144, attention_k_eq_v=False,
                layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7, final_logit_softcapping=30.0,
                tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh"),
        4_628_569_379,
    ),
    "gemma-4-31B": (
        _config("Gemma4ForCausalLM", 60, 5376, 21504, 32, 16, 262144, head_dim=256, global_head_dim=512,
                num_global_key_value_heads=4, rms_norm_eps=1e-6, max_position_embeddings=262144, sliding_window=1024,
                num_kv_shared_layers=0, hidden_size_per_layer_input=0, attention_k_eq_v=True,
                layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 10, final_logit_softcapping=30.0,
                tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh"),
        30_697_345_340,
    ),
    "gemma-3-4b-it": (  # as published: a model that sees, of which the decoder runs
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
         "eos_token_id": [1, 106], "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
         "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                         "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                         "sliding_window": 1024}},
        3_880_263_168,
    ),
}  # fmt: skip
