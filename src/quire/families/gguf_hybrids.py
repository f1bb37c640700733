"""GGUF of models with recurrent layers: LFM2, Granite 4, Nemotron and Falcon-H1, as llama.cpp's converter writes them.

What a layer is shows in which tensors it has; keys that are lists have 0 for layers without the thing. The converter
stores −exp(A_log), convolutions as matrices, and vectors of heads and norms with a second dimension, and multiplies
Falcon-H1's factors into its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.families.gguf_delta import DELTA, delta_config, delta_rules
from quire.families.shape import Fields
from quire.families.weights import Take
from quire.modelspec import ModelSpec

# general.architecture → architecture as in config.json.
HYBRIDS: Mapping[str, str] = {
    "lfm2": "Lfm2ForCausalLM",
    "lfm2moe": "Lfm2MoeForCausalLM",
    "granitehybrid": "GraniteMoeHybridForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "nemotron_h_moe": "NemotronHForCausalLM",
    "falcon-h1": "FalconH1ForCausalLM",
    **DELTA,
}
NAMES: Mapping[str, str] = {
    "conv.o.weight": "shortconv.out_proj.weight",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.o.weight": "ssm_out.weight",
    "moe.latent_in.weight": "ffn_latent_down.weight",
    "moe.latent_out.weight": "ffn_latent_up.weight",
}
Takes = dict[str, tuple[Take, ...]]


def one_value_each(f: Fields) -> Fields:
    """Return the fields with one number where a list has it for some layers, and 0 for the others."""
    values = dict(f.values)
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if not isinstance(listed := values.get(key), list):
            continue
        numbers = {number for number in f.integers(key) if number}
        if len(numbers) != 1 or len(listed) != f.integer("block_count"):
            raise f.wrong(
                key, "one number, or for each of block_count layers 0 or the number that all others have"
            )
        values[key] = numbers.pop()
    return Fields(values, f.where)


def hybrid_config(
    f: Fields, arch: str, config: Mapping[str, Any], tensors: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what ``config.json`` of a hybrid has beside ``config``, the keys of all models."""

    def kinds(by_tensor: Mapping[str, str], other: str) -> list[str]:
        """Name each layer by the first of the tensors that it has."""
        count = config["num_hidden_layers"]
        layers = [[by_tensor[n] for n in by_tensor if f"blk.{i}.{n}.weight" in tensors] for i in range(count)]
        return [(*names, other)[0] for names in layers]

    def has(ending: str) -> bool:
        return any(name.endswith(ending) for name in tensors)

    if arch.startswith("lfm2"):
        conv = {
            "layer_types": kinds({"shortconv.in_proj": "conv"}, "full_attention"),
            "conv_L_cache": f.integer("shortconv.l_cache"),
            "norm_eps": config["rms_norm_eps"],
            "block_auto_adjust_ff_dim": False,
        }
        return conv | (_lfm2_experts(f, has(".exp_probs_b.bias")) if arch == "lfm2moe" else {})
    if arch in DELTA:
        return delta_config(f, config, kinds({"ssm_out": "linear_attention"}, "full_attention"), tensors)
    conv_bias = has(".ssm_conv1d.bias")
    if arch == "granitehybrid":
        types = kinds({"ssm_in": "linear_attention"}, "full_attention")
        return {"layer_types": types, "mamba_conv_bias": conv_bias, **_granite(f, config)}
    heads, head_dim = _heads(f)
    if arch == "falcon-h1":
        return {
            **_scan(f),
            "mamba_d_ssm": heads * head_dim,
            "mamba_conv_bias": conv_bias,
            "mamba_rms_norm": has(".ssm_norm.weight"),
            "mamba_norm_before_gate": False,  # llama.cpp multiplies by the gate first
        }
    names = {"ssm_in": "linear_attention", "attn_q": "full_attention", "ffn_up_exps": "moe"}
    nemotron = {
        "layers_block_type": kinds(names, "mlp"),
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "n_groups": f.integer("ssm.group_count"),
        "ssm_state_size": f.integer("ssm.state_size"),
        "conv_kernel": f.integer("ssm.conv_kernel"),
        "use_conv_bias": conv_bias,
    }
    return nemotron | (_nemotron_experts(f) if arch == "nemotron_h_moe" else {})


def _heads(f: Fields) -> tuple[int, int]:
    """Return the heads of a scan and their size."""
    heads, inner = f.integer("ssm.time_step_rank"), f.integer("ssm.inner_size")
    if inner % heads:
        raise f.wrong("ssm.inner_size", f"a multiple of ssm.time_step_rank = {heads}")
    return heads, inner // heads


def _granite(f: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    (heads, head_dim), hidden = _heads(f), config["hidden_size"]
    if heads * head_dim % hidden:
        raise f.wrong("ssm.inner_size", f"a multiple of embedding_length = {hidden}")
    return {
        "position_embedding_type": "rope" if f.flag("rope.scaling.finetuned", False) else None,
        "num_local_experts": f.integer("expert_count", 0, minimum=0),
        "num_experts_per_tok": f.integer("expert_used_count", 0, minimum=0),
        "shared_intermediate_size": f.integer(
            "expert_shared_feed_forward_length", config["intermediate_size"]
        ),
        **_scan(f),
        "mamba_expand": heads * head_dim // hidden,
    }


def _scan(f: Fields) -> dict[str, Any]:
    heads, head_dim = _heads(f)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_n_groups": f.integer("ssm.group_count"),
        "mamba_d_state": f.integer("ssm.state_size"),
        "mamba_d_conv": f.integer("ssm.conv_kernel"),
    }


def _lfm2_experts(f: Fields, has_bias: bool) -> dict[str, Any]:
    return {
        "num_dense_layers": f.integer("leading_dense_block_count", 0, minimum=0),
        "num_experts": f.integer("expert_count"),
        "num_experts_per_tok": f.integer("expert_used_count"),
        "moe_intermediate_size": f.integer("expert_feed_forward_length"),
        "use_expert_bias": has_bias,
    }


def _nemotron_experts(f: Fields) -> dict[str, Any]:
    groups = f.integer("expert_group_count", 1)
    return {
        "n_routed_experts": f.integer("expert_count"),
        "num_experts_per_tok": f.integer("expert_used_count"),
        "moe_intermediate_size": f.integer("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": f.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": f.flag("expert_weights_norm", True),
        # Rounding to seven digits restores the decimal number that a float32 was made from.
        "routed_scaling_factor": float(f"{f.number('expert_weights_scale', 1.0):.7g}"),
        "n_group": groups,
        "topk_group": f.integer("expert_group_used_count", groups),
        "moe_latent_size": f.optional_integer("moe_latent_size", minimum=1),
    }


def hybrid_rules(spec: ModelSpec, index: int, prefix: str) -> Takes:
    """`LayerRules`. Granite's and Nemotron's rows of q and k are in llama.cpp's pairwise order, rotated or not."""
    if spec.family.startswith("qwen"):
        return delta_rules(spec, index, prefix)
    layer, hidden = spec.layers[index], spec.hidden_size
    takes: Takes = {}
    if spec.family == "falcon_h1":  # the converter leaves the ending out
        names = (f"{prefix}ffn_norm", f"{prefix}ffn_norm.weight")
        takes["mlp_norm.weight"] = tuple(Take((name,), (hidden,)) for name in names)
    if (a := layer.attn) is not None and not spec.family.startswith(("lfm2", "falcon")):
        for name, heads in (("q", a.num_heads), ("k", a.num_kv_heads)):
            take = Take((f"{prefix}attn_{name}.weight",), (heads * a.head_dim, hidden), unpermute_heads=heads)
            takes[f"attn.{name}.weight"] = (take,)
    if (r := layer.recurrent) is None:
        return takes
    if r.kind == "short_conv":
        rows = r.conv_channels
        for number, part in enumerate(("b", "c", "x")):
            take = Take(
                (f"{prefix}shortconv.in_proj.weight",),
                (3 * rows, hidden),
                start=number * rows,
                stop=(number + 1) * rows,
            )
            takes[f"conv.{part}.weight"] = (take,)
        takes["conv.taps.weight"] = (Take((f"{prefix}shortconv.conv.weight",), (rows, r.conv_kernel)),)
        return takes
    widths = {"z": r.v_width, "x": r.v_width, "b": r.k_width, "c": r.k_width, "dt": r.num_v_heads}
    total, start = sum(widths.values()), 0
    for part, width in widths.items():
        take = Take((f"{prefix}ssm_in.weight",), (total, hidden), start=start, stop=start + width)
        takes[f"mamba.{part}.weight"] = (take,)
        start += width
    start, name = 0, f"{prefix}ssm_conv1d."
    for part in ("x", "b", "c"):
        rows = start + widths[part]
        weight = Take((f"{name}weight",), (r.conv_channels, r.conv_kernel), start=start, stop=rows)
        takes[f"mamba.conv_{part}.weight"] = (weight,)
        takes[f"mamba.conv_{part}.bias"] = (
            Take((f"{name}bias",), (r.conv_channels,), start=start, stop=rows),
        )
        start = rows
    of_heads, of_groups = (r.num_v_heads, 1), (r.num_k_heads, r.v_width // r.num_k_heads)
    for part, stored, shape in (
        ("rate", "ssm_a", of_heads),
        ("skip", "ssm_d", of_heads),
        ("norm.weight", "ssm_norm.weight", of_groups),
    ):
        takes[f"mamba.{part}"] = (Take((prefix + stored,), shape, encoding="flat"),)
    return takes
