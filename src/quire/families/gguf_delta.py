"""GGUF of Qwen3.5 and Qwen3-Next: layers with the gated delta rule, in the form that llama.cpp's converter writes.

Value heads of Qwen3.5 are tiled there: first the first one of every key head, then the second ones. They are put back
next to each other. Those of Qwen3-Next are in its own order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.families.qwen_hybrid import GATE_PARTS, INPUT_PARTS, by_key_head, gated_attention
from quire.families.shape import Fields
from quire.families.weights import Take
from quire.modelspec import ModelSpec
from quire.recurrent_spec import RecurrentSpec

Takes = dict[str, tuple[Take, ...]]
# general.architecture → architecture as in config.json.
DELTA: Mapping[str, str] = {
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "qwen3next": "Qwen3NextForCausalLM",
}
NAMES: Mapping[str, str] = {
    "mlp_norm.weight": "post_attention_norm.weight",
    "delta.dt_bias": "ssm_dt.bias",
    "delta.norm.weight": "ssm_norm.weight",
    "delta.o.weight": "ssm_out.weight",
}


def delta_config(
    f: Fields, config: Mapping[str, Any], kinds: Sequence[str], tensors: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what ``config.json`` has beside ``config``; ``kinds``: the type of each layer."""
    heads, inner = f.integer("ssm.time_step_rank"), f.integer("ssm.inner_size")
    if inner % heads:
        raise f.wrong("ssm.inner_size", f"a multiple of ssm.time_step_rank = {heads}")
    delta: dict[str, Any] = {
        "layer_types": list(kinds),
        "linear_num_key_heads": f.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": f.integer("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": f.integer("ssm.conv_kernel"),
    }
    if not f.integer("expert_count", 0, minimum=0):
        return delta
    width = f.integer("expert_feed_forward_length", config["intermediate_size"])
    dense = [i for i in range(len(kinds)) if f"blk.{i}.ffn_gate_inp.weight" not in tensors]
    return delta | {
        "mlp_only_layers": dense,
        "num_experts": f.integer("expert_count"),
        "num_experts_per_tok": f.integer("expert_used_count"),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": f.integer("expert_shared_feed_forward_length", width),
    }


def delta_rules(spec: ModelSpec, index: int, prefix: str) -> Takes:
    """`LayerRules`."""
    layer, hidden = spec.layers[index], spec.hidden_size
    takes = _fused_experts(spec, index, prefix)
    if layer.attn is not None:
        takes |= gated_attention(layer.attn, hidden, f"{prefix}attn_q.")
    if (r := layer.recurrent) is None:
        return takes
    values, numbers = _order(spec, r, r.v_head_dim), _order(spec, r, 1)
    start = 2 * r.k_width
    rows = {
        "q": (range(r.k_width),),
        "k": (range(r.k_width, start),),
        "v": tuple(range(start + piece.start, start + piece.stop) for piece in values),
    }
    for part, pieces in rows.items():
        inputs = Take((f"{prefix}attn_qkv.weight",), (r.conv_channels, hidden), pieces=pieces)
        taps = Take((f"{prefix}ssm_conv1d.weight",), (r.conv_channels, r.conv_kernel), pieces=pieces)
        takes |= {f"delta.{part}.weight": (inputs,), f"delta.conv_{part}.weight": (taps,)}
    takes["delta.z.weight"] = (Take((f"{prefix}attn_gate.weight",), (r.v_width, hidden), pieces=values),)
    takes["delta.rate"] = (Take((f"{prefix}ssm_a",), (r.num_v_heads,), pieces=numbers),)
    takes["delta.dt_bias"] = (Take((f"{prefix}ssm_dt.bias",), (r.num_v_heads,), pieces=numbers),)
    if spec.family == "qwen3_next":
        takes |= by_key_head(r, hidden, f"{prefix}ssm_ba.weight", GATE_PARTS)
        # Files of late 2025 have the inputs as the original has them.
        inputs_together = by_key_head(r, hidden, f"{prefix}ssm_in.weight", INPUT_PARTS)
        return takes | {name: takes[name] + others for name, others in inputs_together.items()}
    for part, stored in (("a", "ssm_alpha"), ("b", "ssm_beta")):
        take = Take((f"{prefix}{stored}.weight",), (r.num_v_heads, hidden), pieces=numbers)
        takes[f"delta.{part}.weight"] = (take,)
    out = Take((f"{prefix}ssm_out.weight",), (hidden, r.v_width), dim=1, pieces=values)
    takes["delta.o.weight"] = (out,)
    return takes


def _order(spec: ModelSpec, r: RecurrentSpec, size: int) -> tuple[range, ...]:
    """Return where each value head lies, in the order of ours; ``size``: of a head."""
    if spec.family == "qwen3_next" or r.num_k_heads == r.num_v_heads:
        return (range(r.num_v_heads * size),)
    per_key = r.num_v_heads // r.num_k_heads
    places = [j * r.num_k_heads + i for i in range(r.num_k_heads) for j in range(per_key)]
    return tuple(range(place * size, (place + 1) * size) for place in places)


def _fused_experts(spec: ModelSpec, index: int, prefix: str) -> Takes:
    """Return takes of gate and up, each a tensor of its own or both in one, gate first."""
    moe = spec.layers[index].mlp.moe
    if moe is None:
        return {}
    count, inter, hidden = moe.num_experts, moe.intermediate_size, spec.hidden_size
    takes: Takes = {}
    for part, start in (("gate", 0), ("up", inter)):
        own = Take((f"{prefix}ffn_{part}_exps.weight",), (count, inter, hidden))
        fused = Take(
            (f"{prefix}ffn_gate_up_exps.weight",),
            (count, 2 * inter, hidden),
            dim=1,
            start=start,
            stop=start + inter,
        )
        takes[f"moe.{part}.weight"] = (own, fused)
    return takes
