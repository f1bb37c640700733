"""What llama.cpp's converter writes of recurrent layers, for `gguf_writer`."""

from __future__ import annotations

from dataclasses import replace

import gguf
import torch

from quire.modelspec import ModelSpec


def hybrid_metadata(writer: gguf.GGUFWriter, arch: str, spec: ModelSpec) -> None:
    attention = spec.attentions[-1]
    kv_heads = [attention.num_kv_heads if layer.attn else 0 for layer in spec.layers]
    writer.kv_data[0].pop(f"{arch}.attention.head_count_kv")
    writer.add_head_count_kv(kv_heads)
    r = next(layer.recurrent for layer in spec.layers if layer.recurrent is not None)
    moe = next((layer.mlp.moe for layer in spec.layers if layer.mlp.moe is not None), None)
    if arch.startswith("lfm2"):
        writer.add_shortconv_l_cache(r.conv_kernel)
    else:
        writer.add_ssm_conv_kernel(r.conv_kernel)
        writer.add_ssm_inner_size(r.v_width)
        writer.add_ssm_state_size(r.k_head_dim)
        writer.add_ssm_time_step_rank(r.num_v_heads)
        writer.add_ssm_group_count(r.num_k_heads)
    if arch == "granitehybrid":
        writer.add_attention_scale(attention.scale)
        writer.add_embedding_scale(spec.embedding_scale)
        writer.add_residual_scale(spec.residual_scale)
        writer.add_logit_scale(1 / spec.logits_scale)
        writer.add_rope_scaling_finetuned(attention.rope is not None)
    if arch.startswith("nemotron"):
        writer.kv_data[0].pop(f"{arch}.feed_forward_length")
        sizes = [0 if layer.mlp.moe else layer.mlp.intermediate_size for layer in spec.layers]
        writer.add_feed_forward_length(
            sizes if any(sizes) else max(x.mlp.intermediate_size for x in spec.layers)
        )
    if moe is None:
        return
    writer.add_expert_count(moe.num_experts)
    writer.add_expert_used_count(moe.top_k)
    writer.add_expert_feed_forward_length(moe.intermediate_size)
    if moe.shared_intermediate_size:
        writer.add_expert_shared_feed_forward_length(moe.shared_intermediate_size)
    if arch == "granitehybrid":
        writer.kv_data[0].pop(f"{arch}.feed_forward_length")
        writer.add_feed_forward_length(moe.intermediate_size)
    if arch in ("qwen35moe", "qwen3next"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    if arch == "lfm2moe":
        writer.add_leading_dense_block_count(sum(layer.mlp.moe is None for layer in spec.layers))
    if arch == "nemotron_h_moe":
        writer.add_expert_weights_norm(moe.normalize_topk)
        writer.add_expert_weights_scale(moe.routed_scale)
        writer.add_expert_group_count(moe.num_groups)
        writer.add_expert_group_used_count(moe.topk_groups)
        if moe.latent_size:
            writer.add_moe_latent_size(moe.latent_size)


def without_factors(
    spec: ModelSpec, weights: dict[str, torch.Tensor]
) -> tuple[ModelSpec, dict[str, torch.Tensor]]:
    """Multiply Falcon-H1's factors into its weights, as the converter does; return the model that has none."""
    layer = spec.layers[0]
    attn, mamba, mlp = layer.attention, layer.recurrent, layer.mlp
    assert mamba is not None
    assert mamba.mamba is not None
    assert layer.scales is not None
    gate, down = mlp.scales or (1.0, 1.0)
    factors = {
        "attn.k.weight": attn.scale * attn.head_dim**0.5,
        "attn.o.weight": layer.scales[0],
        "mamba.o.weight": layer.scales[1],
        "mlp.gate.weight": gate,
        "mlp.down.weight": down,
        **{
            f"mamba.{n}.weight": x
            for n, x in zip(("z", "x", "b", "c", "dt"), mamba.mamba.scales, strict=True)
        },
    }
    top = {"embed.weight": spec.embedding_scale, "lm_head.weight": spec.logits_scale}
    folded = {
        name: tensor * (top[name] if name in top else factors.get(name.split(".", 2)[-1], 1.0))
        for name, tensor in weights.items()
    }
    plain = replace(
        layer,
        attn=replace(attn, scale=attn.head_dim**-0.5),
        mlp=replace(mlp, scales=(1.0, 1.0)),
        recurrent=replace(mamba, mamba=replace(mamba.mamba, scales=(1.0,) * 5)),
        scales=(1.0, 1.0),
    )
    layers = (plain,) * spec.num_layers
    return replace(spec, layers=layers, embedding_scale=1.0, logits_scale=1.0), folded


def recurrent_tensors(spec: ModelSpec, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(spec.layers):
        if (r := layer.recurrent) is None:
            continue
        own, to = f"layers.{index}.", f"blk.{index}."

        def joined(names: str, ending: str, own: str = own) -> torch.Tensor:
            return torch.cat([weights[f"{own}{name}.{ending}"] for name in names.split()])

        if r.kind == "short_conv":
            found[f"{to}shortconv.in_proj.weight"] = joined("conv.b conv.c conv.x", "weight")
            found[f"{to}shortconv.conv.weight"] = weights[f"{own}conv.taps.weight"]
            found[f"{to}shortconv.out_proj.weight"] = weights[f"{own}conv.o.weight"]
            continue
        found[f"{to}ssm_in.weight"] = joined("mamba.z mamba.x mamba.b mamba.c mamba.dt", "weight")
        taps = "mamba.conv_x mamba.conv_b mamba.conv_c"
        found[f"{to}ssm_conv1d.weight"] = joined(taps, "weight")
        if r.conv_bias:
            found[f"{to}ssm_conv1d.bias"] = joined(taps, "bias")
        found[f"{to}ssm_dt.bias"] = weights[f"{own}mamba.dt_bias"]
        found[f"{to}ssm_a"] = weights[f"{own}mamba.rate"].unsqueeze(1)
        found[f"{to}ssm_d"] = weights[f"{own}mamba.skip"].unsqueeze(1)
        if f"{own}mamba.norm.weight" in weights:
            found[f"{to}ssm_norm.weight"] = weights[f"{own}mamba.norm.weight"].view(r.num_k_heads, -1)
        found[f"{to}ssm_out.weight"] = weights[f"{own}mamba.o.weight"]
    return found
