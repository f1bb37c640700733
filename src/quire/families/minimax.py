"""MiniMax-M2 (2025): RMSNorm over the whole projections of q and k, a part of each head rotates, many small experts."""

from __future__ import annotations

from quire.families.rope import rope_from_config
from quire.families.shape import Fields, activation, assemble, attention
from quire.families.weights import LLAMA_NAMES, Family, Take, WeightMap, build_map, expert_takes
from quire.modelspec import LayerSpec, MlpSpec, ModelSpec, MoeSpec


def read_minimax_m2(f: Fields) -> ModelSpec:
    head_dim = f.integer("head_dim", 128)
    fields = f
    if f.has("rotary_dim"):  # how the published files say which part of a head rotates
        part = f.integer("rotary_dim") / head_dim
        if part > 1:
            raise f.wrong("rotary_dim", f"at most head_dim = {head_dim}")
        fields = Fields({**f.values, "partial_rotary_factor": part}, f.where)
    rope = rope_from_config(fields, head_dim, default_theta=5e6, partial=True)
    f.refuse("scoring_func", unless=("sigmoid",), why="routing of MiniMax-M2")
    f.refuse("use_qk_norm", unless=(True,), why="every published checkpoint has these norms")
    f.refuse("qk_norm_type", unless=("per_layer",), why="the norms go over all heads")
    f.refuse("shared_intermediate_size", unless=(0,), why="no published checkpoint has shared experts")
    for key in ("attn_type_list", "layer_types"):
        for kind in f.items(key):
            if kind not in (1, "full_attention"):
                raise f.wrong(key, "full attention (1) for each layer")
    moe = MoeSpec(
        num_experts=f.integer("num_local_experts", 256),
        top_k=f.integer("num_experts_per_tok", 8),
        intermediate_size=f.integer("intermediate_size"),
        scoring="sigmoid",
        correction_bias=True,
    )
    if moe.top_k > moe.num_experts:
        raise f.wrong("num_experts_per_tok", f"at most num_local_experts = {moe.num_experts}")
    attn = attention(f, rope=rope, head_dim=head_dim, qk_norm="full")
    return assemble(f, "minimax_m2", LayerSpec(attn, MlpSpec(moe.intermediate_size, activation(f), moe=moe)))


def _rules(spec: ModelSpec, index: int, prefix: str) -> dict[str, tuple[Take, ...]]:
    moe = spec.layers[index].mlp.moe
    assert moe is not None
    takes = expert_takes(
        spec, index, f"{prefix}block_sparse_moe.experts.", ("w1", "w3", "w2"), f"{prefix}mlp.experts."
    )
    for name, stored, shape in (
        ("router.weight", "gate.weight", (moe.num_experts, spec.hidden_size)),
        ("correction_bias", "e_score_correction_bias", (moe.num_experts,)),
    ):
        folders = (f"{prefix}block_sparse_moe.", f"{prefix}mlp.")
        takes[f"moe.{name}"] = tuple(Take((folder + stored,), shape) for folder in folders)
    return takes


def weights(spec: ModelSpec) -> WeightMap:
    """Ignore layers from ``num_hidden_layers`` on: up to three for multi-token prediction, which nothing here uses."""
    extra = "|".join(str(spec.num_layers + number) for number in range(3))
    extra = rf"model\.layers\.({extra})\..*"
    return build_map(spec, LLAMA_NAMES, _rules, ignore=(extra,))


MINIMAX_M2 = Family("minimax_m2", read_minimax_m2, weights)
