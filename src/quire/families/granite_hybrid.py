"""Granite 4.0 (IBM 2025): Mamba-2 or attention in each layer, before a block of its own or experts next to one."""

from __future__ import annotations

from dataclasses import replace

from quire.families.mamba import KEYS, layer_kinds, mamba_names, mamba_of, mamba_takes, with_length
from quire.families.rope import rope_from_config
from quire.families.shape import Fields, activation, assemble, attention, biases, head_dim_of
from quire.families.weights import LLAMA_NAMES, Family, Take, WeightMap, build_map
from quire.modelspec import LayerSpec, MlpSpec, ModelSpec, MoeSpec

_NAMES = {
    **LLAMA_NAMES,
    **mamba_names("mamba"),
    "mlp.down.weight": "shared_mlp.output_linear.weight",
    "moe.shared.down.weight": "shared_mlp.output_linear.weight",
}
_KEYS = (
    (r"shared_mlp\..*", ("shared_intermediate_size", "hidden_size")),
    (r"block_sparse_moe\..*", ("num_local_experts", "intermediate_size", "hidden_size")),
    *KEYS,
)


def read_granitemoehybrid(f: Fields) -> ModelSpec:
    """Dense where num_local_experts is 0."""
    f.refuse("normalization_function", unless=("rmsnorm",), why="norms of this family are RMSNorm")
    count, act = f.integer("num_hidden_layers", 32), activation(f)
    shared = f.integer("shared_intermediate_size", 1024)
    experts = f.integer("num_local_experts", 8, minimum=0)
    mlp = MlpSpec(shared, act)
    if experts:
        moe = MoeSpec(
            experts,
            f.integer("num_experts_per_tok", 2),
            f.integer("intermediate_size", 11_008),
            scoring="softmax_after_topk",
            shared_intermediate_size=shared,
        )
        if moe.top_k > experts:
            raise f.wrong("num_experts_per_tok", f"at most the {experts} experts")
        mlp = MlpSpec(moe.intermediate_size, act, moe=moe)
    rope = rope_from_config(f, head_dim_of(f))
    rotates = f.values.get("position_embedding_type") == "rope"
    attn = attention(
        f,
        rope=rope if rotates else None,
        scale=f.number("attention_multiplier", 1.0, positive=False),
        **biases(f),
    )
    mamba = mamba_of(f, f.integer("hidden_size"), "gate_first")
    linear = ["linear_attention"] * count
    kinds = layer_kinds(f, count, linear, {"linear_attention", "full_attention"})
    if "full_attention" not in kinds:
        raise f.wrong("layer_types", "a list with one layer of attention at least")
    layers = [
        LayerSpec(attn, mlp) if kind == "full_attention" else LayerSpec(None, mlp, recurrent=mamba)
        for kind in kinds
    ]
    return assemble(
        with_length(f, 2048), "granitemoehybrid", layers,
        embedding_scale=f.number("embedding_multiplier", 1.0, positive=False),
        residual_scale=f.number("residual_multiplier", 1.0, positive=False),
        logits_scale=1 / f.number("logits_scaling", 1.0),
    )  # fmt: skip


def _halves(name: str, inter: int, hidden: int, block: str) -> dict[str, tuple[Take, ...]]:
    shape = (2 * inter, hidden)
    parts = {
        "gate": Take((name,), shape, stop=inter),
        "up": Take((name,), shape, start=inter, stop=2 * inter),
    }
    return {f"{block}.{part}.weight": (take,) for part, take in parts.items()}


def _rules(spec: ModelSpec, index: int, prefix: str) -> dict[str, tuple[Take, ...]]:
    """`LayerRules`; experts and the router have two names: on the hub, and inside transformers 5."""
    takes, mlp = mamba_takes(spec, index, f"{prefix}mamba."), spec.layers[index].mlp
    hidden, shared = spec.hidden_size, f"{prefix}shared_mlp.input_linear.weight"
    if (moe := mlp.moe) is None:
        return takes | _halves(shared, mlp.intermediate_size, hidden, "mlp")
    takes |= _halves(shared, moe.shared_intermediate_size, hidden, "moe.shared")
    folder, count, inter = f"{prefix}block_sparse_moe.", moe.num_experts, moe.intermediate_size
    for number, part in enumerate(("gate", "up")):
        takes[f"moe.{part}.weight"] = tuple(
            Take(
                (folder + name,),
                (count, 2 * inter, hidden),
                dim=1,
                start=number * inter,
                stop=(number + 1) * inter,
            )
            for name in ("input_linear.weight", "experts.gate_up_proj")
        )
    for part, shape, names in (
        ("down", (count, hidden, inter), ("output_linear.weight", "experts.down_proj")),
        ("router", (count, hidden), ("router.layer.weight", "router.weight")),
    ):
        takes[f"moe.{part}.weight"] = tuple(Take((folder + name,), shape) for name in names)
    return takes


def weights(spec: ModelSpec) -> WeightMap:
    return replace(build_map(spec, _NAMES, _rules), keys=_KEYS)


GRANITEMOEHYBRID = Family("granitemoehybrid", read_granitemoehybrid, weights)
