"""Mixtures of experts in GGUF: llama.cpp's metadata → the keys of ``config.json`` that say how tokens are routed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.families.shape import Fields

SIGMOID = 2  # expert_gating_func of DeepSeek-V3


def decimal(value: float) -> float:
    """Return the decimal number that a float32 was made from: rounding to seven digits restores it."""
    return float(f"{value:.7g}")


def experts(f: Fields, arch: str, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a mixture of experts with plain attention."""
    if arch == "glm4moe":
        return _glm4(f, tensors)
    used = f.integer("expert_used_count")
    counts: dict[str, Any] = {
        "num_local_experts": f.integer("expert_count"),
        "num_experts_per_tok": used,
    }
    width = f.integer("expert_feed_forward_length", max(1, config["intermediate_size"] // used))
    if arch == "llama":
        return counts
    if arch == "minimax-m2":
        scores = {0: "sigmoid", SIGMOID: "sigmoid", 1: "softmax"}
        return counts | {
            "intermediate_size": width,
            "scoring_func": scores.get(f.integer("expert_gating_func", 0, minimum=0), "unknown"),
        }
    if arch == "gpt-oss":
        # llama.cpp rounds the ends of YaRN's ramp to whole dimensions; the model was trained without that.
        scaling = {**config.get("rope_scaling", {}), "truncate": False}
        window = f.integer("attention.sliding_window", 128)
        return counts | {"intermediate_size": width, "sliding_window": window, "rope_scaling": scaling}
    dense = [i for i in range(config["num_hidden_layers"]) if f"blk.{i}.ffn_gate_inp.weight" not in tensors]
    counts |= {"moe_intermediate_size": width, "mlp_only_layers": dense, "norm_topk_prob": arch == "qwen3moe"}
    if arch == "qwen2moe":
        shared = f.integer("expert_shared_feed_forward_length", config["intermediate_size"])
        biased = any(re.fullmatch(r"blk\.\d+\.attn_(q|k|v)\.bias", name) for name in tensors)
        counts |= {"shared_expert_intermediate_size": shared, "qkv_bias": biased}
    return counts


def deepseek_routing(f: Fields) -> dict[str, Any]:
    """Return the routing of DeepSeek's and GLM's. A file that names no groups of experts has one, as in llama.cpp."""
    groups = f.integer("expert_group_count", 1)
    return {
        "first_k_dense_replace": f.integer("leading_dense_block_count", 0, minimum=0),
        "moe_intermediate_size": f.integer("expert_feed_forward_length"),
        "n_routed_experts": f.integer("expert_count"),
        "n_shared_experts": f.integer("expert_shared_count", 0, minimum=0),
        "num_experts_per_tok": f.integer("expert_used_count"),
        "norm_topk_prob": f.flag("expert_weights_norm", False),
        "routed_scaling_factor": decimal(f.number("expert_weights_scale", 1.0)),
        "n_group": groups,
        "topk_group": f.integer("expert_group_used_count", groups),
    }


def _glm4(f: Fields, tensors: Mapping[str, Any]) -> dict[str, Any]:
    f.refuse("expert_gating_func", unless=(0, SIGMOID), why="GLM-4.5 scores experts by a sigmoid")
    return deepseek_routing(f) | {"use_qk_norm": "blk.0.attn_q_norm.weight" in tensors}
