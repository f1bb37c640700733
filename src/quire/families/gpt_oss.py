"""gpt-oss (arXiv:2508.10925): attention sinks, alternating windows, biased experts with a clamped SwiGLU.

The published checkpoints hold the experts in MXFP4; they are expanded when loaded.
"""

from __future__ import annotations

from quire.families.rope import rope_from_config
from quire.families.shape import Fields, assemble, attention, biases, layer_types, window_of
from quire.families.weights import LLAMA_NAMES, Family, Shape, Take, WeightMap, build_map
from quire.modelspec import LayerSpec, MlpSpec, ModelSpec, MoeSpec

_NAMES = {**LLAMA_NAMES, "moe.router.weight": "mlp.router.weight", "moe.router.bias": "mlp.router.bias"}
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read(f: Fields) -> ModelSpec:
    f.refuse("swiglu_alpha", unless=(1.702,), why="the activation is built for the published constants")
    f.refuse("swiglu_limit", unless=(7.0,), why="the activation is built for the published constants")
    f.refuse("hidden_act", unless=("silu",), why="the experts have their own activation")
    count = f.integer("num_hidden_layers")
    if not f.has("rope_parameters") and not f.has("rope_scaling"):
        f = Fields({**f.values, "rope_scaling": _DEFAULT_ROPE}, f.where)
    head_dim = f.integer("head_dim", 64)
    rope = rope_from_config(f, head_dim, default_theta=150_000.0)
    moe = MoeSpec(
        num_experts=f.integer("num_local_experts", f.optional_integer("num_experts", minimum=1)),
        top_k=f.integer("num_experts_per_tok", f.optional_integer("experts_per_token", minimum=1)),
        intermediate_size=f.integer("intermediate_size"),
        scoring="softmax_after_topk",
        router_bias=True,
        expert_bias=True,
    )
    if moe.top_k > moe.num_experts:
        raise f.wrong("num_experts_per_tok", f"at most num_local_experts = {moe.num_experts}")
    kinds = layer_types(f, ["full_attention" if i % 2 else "sliding_attention" for i in range(count)])
    mlp = MlpSpec(moe.intermediate_size, "swiglu_oai", moe=moe)
    attentions = [
        attention(
            f, rope=rope, window=window_of(f, kind, 128), sinks=True, head_dim=head_dim, **biases(f, True)
        )
        for kind in kinds
    ]
    return assemble(f, "gpt_oss", [LayerSpec(attention, mlp) for attention in attentions], eps=1e-5)


def _rules(spec: ModelSpec, index: int, prefix: str) -> dict[str, tuple[Take, ...]]:
    """Return takes of two forms: ``[experts, in, out]`` in a plain type, or ``[experts, out, in]`` in MXFP4 (hub).

    Gate and up alternate along ``out``: 0, 2, … and 1, 3, …
    """
    moe = spec.layers[index].mlp.moe
    assert moe is not None
    count, inter, hidden = moe.num_experts, moe.intermediate_size, spec.hidden_size
    folder = f"{prefix}mlp.experts."

    def packed(name: str, shape: Shape, first: int = 0, step: int = 1) -> Take:
        names = (f"{folder}{name}_blocks", f"{folder}{name}_scales")
        return Take(names, shape, dim=1, start=first, step=step, encoding="mxfp4")

    takes: dict[str, tuple[Take, ...]] = {}
    for first, part in enumerate(("gate", "up")):
        plain = Take(
            (f"{folder}gate_up_proj",), (count, hidden, 2 * inter), transpose=True, dim=1, start=first, step=2
        )
        bias = Take((f"{folder}gate_up_proj_bias",), (count, 2 * inter), dim=1, start=first, step=2)
        takes[f"moe.{part}.weight"] = (plain, packed("gate_up_proj", (count, 2 * inter, hidden), first, 2))
        takes[f"moe.{part}.bias"] = (bias,)
    takes["moe.down.weight"] = (
        Take((f"{folder}down_proj",), (count, inter, hidden), transpose=True),
        packed("down_proj", (count, hidden, inter)),
    )
    takes["moe.down.bias"] = (Take((f"{folder}down_proj_bias",), (count, hidden)),)
    return takes


def weights(spec: ModelSpec) -> WeightMap:
    return build_map(spec, _NAMES, _rules)


GPT_OSS = Family("gpt_oss", read, weights, quantizations=("mxfp4",))
