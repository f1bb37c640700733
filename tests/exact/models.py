"""Tiny models with odd sizes: the shapes that vector tails and tiles get wrong first."""

from __future__ import annotations

import math
from dataclasses import replace
from math import sqrt
from typing import Literal

from quire.families.head_spec import HeadMethod, HeadSpec
from quire.modelspec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, PerLayerSpec
from quire.recurrent_spec import ChannelGateSpec, MambaSpec, RecurrentSpec
from quire.rope_spec import RopeSpec

VOCAB = 131
MAX_MODEL_LEN = 320
EOS = 2


def _attention(**changes: object) -> AttentionSpec:
    base: dict[str, object] = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 12,
        "v_head_dim": 12,
        "scale": 1 / sqrt(12),
        "rope": RopeSpec(theta=10_000.0, dim=12),
    }
    return AttentionSpec(**(base | changes))  # type: ignore[arg-type]


def _model(family: str, architecture: str, layers: tuple[LayerSpec, ...]) -> ModelSpec:
    return ModelSpec(
        family=family,
        architecture=architecture,
        vocab_size=VOCAB,
        hidden_size=44,
        layers=layers,
        norm_eps=1e-5,
        max_position_embeddings=MAX_MODEL_LEN,
        dtype="float32",
        eos_token_ids=(EOS,),
    )


def llama() -> ModelSpec:
    """Grouped-query attention, everything full."""
    layer = LayerSpec(_attention(), MlpSpec(intermediate_size=75))
    return _model("llama", "LlamaForCausalLM", (layer, layer))


def sliding() -> ModelSpec:
    """Two cache groups: windows of 20 (not a multiple of the block) beside full attention; sinks, caps, q/k norms."""
    narrow = LayerSpec(
        _attention(window=20, soft_cap=8.0, qk_norm="head"),
        MlpSpec(50, activation="gelu_tanh"),
        norms="sandwich",
    )
    wide = LayerSpec(_attention(sinks=True, qkv_bias=True), MlpSpec(50), norms="sandwich")
    return _model("llama", "LlamaForCausalLM", (narrow, wide))


def moe() -> ModelSpec:
    """Six experts, two of them a token, and a gated shared one."""
    experts = MoeSpec(
        num_experts=6, top_k=2, intermediate_size=22, shared_intermediate_size=30, shared_gate=True
    )
    layer = LayerSpec(_attention(num_kv_heads=4), MlpSpec(22, moe=experts))
    return _model("llama", "LlamaForCausalLM", (layer, layer))


def latent() -> ModelSpec:
    """Multi-head latent attention, and experts chosen within groups by sigmoid scores (DeepSeek-V3)."""
    attention = AttentionSpec(
        num_heads=4,
        num_kv_heads=4,
        head_dim=20,
        v_head_dim=14,
        scale=1 / sqrt(20),
        rope=RopeSpec(theta=10_000.0, dim=8, interleaved=True),
        q_lora_rank=18,
        kv_lora_rank=26,
        qk_nope_head_dim=12,
    )
    experts = MoeSpec(
        num_experts=8,
        top_k=3,
        intermediate_size=18,
        scoring="sigmoid",
        routed_scale=2.5,
        correction_bias=True,
        num_groups=4,
        topk_groups=2,
        group_score="top2_sum",
        shared_intermediate_size=21,
    )
    dense, sparse = MlpSpec(40), MlpSpec(18, moe=experts)
    return _model(
        "deepseek_v3", "DeepseekV3ForCausalLM", (LayerSpec(attention, dense), LayerSpec(attention, sparse))
    )


def post_norm() -> ModelSpec:
    """Norms after the blocks, full q/k norms, partial rope, biases, tied and scaled embeddings, capped logits."""
    attention = _attention(qk_norm="full", rope=RopeSpec(theta=10_000.0, dim=6))
    layer = LayerSpec(attention, MlpSpec(61, activation="swiglu_oai", bias=True), norms="post")
    return replace(
        _model("olmo2", "Olmo2ForCausalLM", (layer, layer)),
        tie_word_embeddings=True,
        embedding_scale=3.0,
        residual_scale=0.5,
        logits_soft_cap=20.0,
    )


def head_spec(spec: ModelSpec, method: HeadMethod) -> HeadSpec:
    """Heads for ``spec``: two Medusa heads, or a layer of its last one's kind."""
    sizes = method, spec.hidden_size, spec.vocab_size
    if method == "medusa":
        return HeadSpec(*sizes, num_heads=2, num_blocks=2, block_bias=True)
    last = LayerSpec(_attention(), MlpSpec(40))
    model = replace(spec, layers=spec.layers[-1:] if method == "mtp" else (last,))
    if method == "eagle3":
        return HeadSpec(*sizes, model, taps=(0, 1), draft_vocab_size=spec.vocab_size)
    return HeadSpec(*sizes, model, fc_bias=method == "eagle")


def even() -> ModelSpec:
    """Widths that blocks of 64 and 32 inputs divide (`kernels.rotation`), and tied embeddings."""
    attention = _attention(head_dim=16, v_head_dim=16, rope=RopeSpec(theta=10_000.0, dim=16))
    layer = LayerSpec(attention, MlpSpec(96))
    model = _model("llama", "LlamaForCausalLM", (layer, layer))
    return replace(model, hidden_size=64, tie_word_embeddings=True)


def even_moe() -> ModelSpec:
    """The same with experts whose inputs blocks of 16 divide."""
    experts = MoeSpec(num_experts=6, top_k=2, intermediate_size=48, shared_intermediate_size=32)
    dense = even()
    return replace(dense, layers=(dense.layers[0], replace(dense.layers[1], mlp=MlpSpec(48, moe=experts))))


def per_layer() -> ModelSpec:
    """Heads of two sizes in one pool of blocks, layers that read others' K and V, embeddings per layer (Gemma 4)."""
    common = {"scale": 1.0, "qk_norm": "head", "v_norm": True}
    local = _attention(window=20, **common)
    turns = RopeSpec(1e6, 24, "proportional", part=0.25)
    wide = {"num_kv_heads": 1, "head_dim": 24, "v_head_dim": 24, "rope": turns, "v_from_k": True}
    full = _attention(**(common | wide))
    mlp = MlpSpec(50, activation="gelu_tanh")
    attentions = (local, local, full, replace(local, kv_layer=1), replace(full, kv_layer=2, v_from_k=False))
    layers = tuple(LayerSpec(each, mlp, "sandwich") for each in attentions)
    model = _model("gemma4", "Gemma4ForCausalLM", layers)
    return replace(model, tie_word_embeddings=True, per_layer=PerLayerSpec(6, VOCAB))


def beside_experts() -> ModelSpec:
    """Experts next to a dense block, each with norms of its own (Gemma 4 26B-A4B)."""
    attention = _attention(scale=1.0, qk_norm="head", v_norm=True)
    experts = MoeSpec(6, 2, 22, shared_intermediate_size=50, own_norms=True)
    layer = LayerSpec(attention, MlpSpec(22, activation="gelu_tanh", moe=experts), "sandwich")
    model = _model("gemma4", "Gemma4ForCausalLM", (layer, layer))
    return replace(model, tie_word_embeddings=True, per_layer=PerLayerSpec())


def hybrid() -> ModelSpec:
    """Recurrent layers on both sides of one with gated attention (Qwen3.5)."""
    attention = _attention(output_gate=True, qk_norm="head", rope=RopeSpec(theta=10_000.0, dim=4))
    full = LayerSpec(attention, MlpSpec(50))
    state = LayerSpec(None, MlpSpec(50), recurrent=RecurrentSpec("gated_delta", 2, 4, 8, 6, 4, 56))
    return replace(_model("qwen3_5", "Qwen3_5ForCausalLM", (state, full, state)), norm_plus_one=True)


def side_by_side() -> ModelSpec:
    """LayerNorm, attention and MLP in parallel, windows beside layers without positions (Command R7B)."""
    attentions = _attention(window=20, qkv_bias=True, o_bias=True), _attention(rope=None)
    layers = tuple(LayerSpec(attn, MlpSpec(50), "parallel") for attn in attentions)
    model = _model("cohere2", "Cohere2ForCausalLM", layers)
    return replace(model, norm_centered=True, tie_word_embeddings=True, logits_scale=0.3)


def channel_decays() -> ModelSpec:
    """A decay per channel, through few columns and bounded, around latent attention (Kimi Linear, Ling 3)."""
    latent = AttentionSpec(
        4, 4, 20, 14, 1 / sqrt(20), None, output_gate="head", kv_lora_rank=26, qk_nope_head_dim=12
    )
    states = (
        RecurrentSpec("channel_delta", 4, 4, 8, 6, 4, 88, gate=ChannelGateSpec(*gate))
        for gate in ((5, None), (0, -5.0))
    )
    first, last = (LayerSpec(None, MlpSpec(50), recurrent=state) for state in states)
    return _model("kimi_linear", "KimiLinearForCausalLM", (first, LayerSpec(latent, MlpSpec(50)), last))


def convolutions() -> ModelSpec:
    """Gated short convolutions with biases around attention with a gate per head (LFM3), and windows."""
    attention = _attention(output_gate="head", qk_norm="head", window=20)
    full = LayerSpec(attention, MlpSpec(50), norms="sandwich")
    conv = RecurrentSpec("short_conv", 0, 0, 0, 0, 3, 44, conv_bias=True, bias=True)
    return _model("lfm3", "Lfm3ForCausalLM", (LayerSpec(None, MlpSpec(50), "sandwich", conv), full))


def _scan(norm: Literal["none", "gate_first"], **changes: object) -> RecurrentSpec:
    scales = (0.9, 1.2, 0.8, 1.1, 0.6)
    base = RecurrentSpec(
        "mamba2", 2, 4, 8, 6, 4, 56, conv_bias=True, mamba=MambaSpec(norm, (0.01, math.inf), scales)
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def mamba() -> ModelSpec:
    """Mamba-2's scan on both sides of attention without positions, and experts (Granite 4)."""
    experts = MoeSpec(6, 2, 22, scoring="softmax_after_topk", shared_intermediate_size=30)
    full = LayerSpec(_attention(rope=None), MlpSpec(22, moe=experts))
    state = LayerSpec(None, MlpSpec(50), recurrent=_scan("gate_first", bias=True))
    return replace(_model("granitemoehybrid", "G", (state, full, state)), residual_scale=0.4)


def parallel() -> ModelSpec:
    """Attention with a window and Mamba-2 in parallel in each layer, with factors (Falcon-H1)."""
    mlp = MlpSpec(50, scales=(0.7, 1.4))
    layers = (
        LayerSpec(attn, mlp, recurrent=_scan("none"), scales=(1.5, 0.6))
        for attn in (_attention(window=20), _attention())
    )
    return _model("falcon_h1", "F", tuple(layers))


def blocks() -> ModelSpec:
    """Each block is one of Mamba-2, experts with a latent projection, attention, and an MLP without a gate."""
    experts = MoeSpec(
        6, 2, 22, scoring="sigmoid", correction_bias=True, shared_intermediate_size=30, latent_size=26
    )
    kinds = (
        LayerSpec(None, MlpSpec(0), recurrent=_scan("gate_first")),
        LayerSpec(None, MlpSpec(22, "relu2", moe=experts)),
        LayerSpec(_attention(rope=None), MlpSpec(0)),
        LayerSpec(None, MlpSpec(50, "relu2")),
    )
    return _model("nemotron_h", "N", kinds)


MODELS = {"llama": llama, "sliding": sliding, "moe": moe, "latent": latent, "post_norm": post_norm}
# Some are for tests of their own alone.
KNOWN_MODELS = MODELS | {
    "even": even,
    "even_moe": even_moe,
    "per_layer": per_layer,
    "beside_experts": beside_experts,
    "hybrid": hybrid,
    "channel_decays": channel_decays,
    "side_by_side": side_by_side,
    "convolutions": convolutions,
    "mamba": mamba,
    "parallel": parallel,
    "blocks": blocks,
}
