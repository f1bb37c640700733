"""Shapes of weights that plain decoders lack: latent attention, experts, MLPs without a gate, embeddings per layer.

`quire.modelspec.weight_shapes` asks for them, and has the canonical names.
"""

from __future__ import annotations

from quire.modelspec import UNGATED, AttentionSpec, MlpSpec

Shapes = dict[str, tuple[int, ...]]


def latent_shapes(a: AttentionSpec, hidden: int) -> Shapes:
    """Return the shapes of MLA, but ``attn.o``."""
    shapes: Shapes = {}
    rope_dim = a.head_dim - a.qk_nope_head_dim
    if a.q_lora_rank:
        shapes["attn.q_a.weight"] = (a.q_lora_rank, hidden)
        shapes["attn.q_a_norm.weight"] = (a.q_lora_rank,)
        shapes["attn.q_b.weight"] = (a.num_heads * a.head_dim, a.q_lora_rank)
    else:
        shapes["attn.q.weight"] = (a.num_heads * a.head_dim, hidden)
    shapes["attn.kv_a.weight"] = (a.kv_lora_rank + rope_dim, hidden)
    shapes["attn.kv_a_norm.weight"] = (a.kv_lora_rank,)
    shapes["attn.kv_b.weight"] = (a.num_heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank)
    if a.output_gate:
        shapes["attn.gate.weight"] = (a.num_heads, hidden)
    if a.qkv_bias:
        shapes["attn.q_a.bias"] = (a.q_lora_rank,)
        shapes["attn.kv_a.bias"] = (a.kv_lora_rank + rope_dim,)
    return shapes


def per_layer_shapes(size: int, hidden: int) -> Shapes:
    """Return the shapes of one layer; ``size``: numbers of its embedding, 0 where it has none."""
    shapes: Shapes = {"per_layer.scale": (1,)}
    if size:
        shapes["per_layer.gate.weight"] = (size, hidden)
        shapes["per_layer.out.weight"] = (hidden, size)
        shapes["per_layer.norm.weight"] = (hidden,)
    return shapes


def mlp_shapes(mlp: MlpSpec, hidden: int) -> Shapes:
    """Return the shapes of a layer's experts, or of its block without a gate."""
    up = ("up",) if mlp.activation in UNGATED else ("gate", "up")

    def block(
        prefix: str, inter: int, lead: tuple[int, ...] = (), bias: bool = False, size: int = hidden
    ) -> Shapes:
        shapes = {f"{prefix}.{n}.weight": (*lead, inter, size) for n in up}
        shapes[f"{prefix}.down.weight"] = (*lead, size, inter)
        if bias:
            shapes.update({f"{prefix}.{n}.bias": (*lead, inter) for n in up})
            shapes[f"{prefix}.down.bias"] = (*lead, size)
        return shapes

    moe = mlp.moe
    if moe is None:
        shapes = block("mlp", mlp.intermediate_size, bias=mlp.bias) if mlp.intermediate_size else {}
        return shapes | ({"mlp.alpha_p": (1,), "mlp.alpha_n": (1,)} if mlp.activation == "xielu" else {})
    shapes = {"moe.router.weight": (moe.num_experts, hidden)}
    if moe.router_bias:
        shapes["moe.router.bias"] = (moe.num_experts,)
    if moe.correction_bias:
        shapes["moe.correction_bias"] = (moe.num_experts,)
    size = moe.latent_size or hidden
    shapes.update(block("moe", moe.intermediate_size, (moe.num_experts,), moe.expert_bias, size))
    if moe.shared_intermediate_size:
        shapes.update(block("moe.shared", moe.shared_intermediate_size))
    if moe.shared_gate:
        shapes["moe.shared_gate.weight"] = (1, hidden)
    if moe.own_norms:
        norms = ("router_norm", "norm", "post_norm", "shared_post_norm")
        shapes |= {f"moe.{name}.weight": (hidden,) for name in norms}
        shapes["moe.expert_scale"] = (moe.num_experts,)
    if moe.latent_size:
        shapes |= {"moe.latent_in.weight": (size, hidden), "moe.latent_out.weight": (hidden, size)}
    return shapes
