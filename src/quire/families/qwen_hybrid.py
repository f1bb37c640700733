"""Qwen3-Next (2025) and Qwen3.5 (2026): three layers with the gated delta rule to one with gated attention.

Experts, where a model has them, are as in Qwen2-MoE, with a gated shared one. Qwen3-Next stores the rows of a recurrent
layer's inputs key head by key head, Qwen3.5 part by part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from quire.families.rope import rope_from_config
from quire.families.shape import Fields, activation, assemble, attention, biases
from quire.families.weights import LLAMA_NAMES, Family, LayerRules, Take, WeightMap, build_map, expert_rules
from quire.modelspec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from quire.recurrent_spec import RecurrentSpec

_DELTA = "linear_attn."
NAMES = {
    **LLAMA_NAMES,
    "moe.shared_gate.weight": "mlp.shared_expert_gate.weight",
    **{f"moe.shared.{n}.weight": f"mlp.shared_expert.{n}_proj.weight" for n in ("gate", "up", "down")},
    "delta.dt_bias": f"{_DELTA}dt_bias",
    "delta.norm.weight": f"{_DELTA}norm.weight",
    "delta.o.weight": f"{_DELTA}out_proj.weight",
}
# Which keys decide about tensors, beside those of other families.
_KINDS = ("layer_types", "full_attention_interval")
_KEYS = (
    (r"linear_attn\.(A_log|dt_bias|norm\.weight|conv1d\.weight|\w+_proj\w*\.weight)",
     ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
      "linear_conv_kernel_dim", *_KINDS)),
    (r"self_attn\..*", _KINDS),
)  # fmt: skip
# Of Qwen3-Next, in the order in which they lie.
INPUT_PARTS, GATE_PARTS = "qkvz", "ba"
# A layer for multi-token prediction (`quire.families.mtp`), which the decoder does not use.
_MTP = (r"mtp\..*",)


def read_qwen3_5(f: Fields) -> ModelSpec:
    """Qwen3.5 and later, dense."""
    mlp = MlpSpec(f.integer("intermediate_size", 12_288), activation(f))
    return _read(f, "qwen3_5", [mlp] * f.integer("num_hidden_layers", 32), (16, 4))


def read_qwen3_5_moe(f: Fields) -> ModelSpec:
    """Qwen3.5-35B-A3B and its like: experts in every layer."""
    f.refuse(
        "norm_topk_prob", unless=(True,), why="this family always divides the weights of experts by their sum"
    )
    return _read(f, "qwen3_5_moe", [_sparse(f, 256, 8)] * f.integer("num_hidden_layers", 40), (16, 2))


def read_qwen3_next(f: Fields) -> ModelSpec:
    """Qwen3-Next-80B-A3B."""
    step, dense = f.integer("decoder_sparse_step", 1), set(f.integers("mlp_only_layers"))
    plain, sparse = MlpSpec(f.integer("intermediate_size", 5632), activation(f)), _sparse(f, 512, 10)
    count = f.integer("num_hidden_layers", 48)
    mlps = [plain if index in dense or (index + 1) % step else sparse for index in range(count)]
    return _read(f, "qwen3_next", mlps, (16, 2))


def _read(f: Fields, family: str, mlps: list[MlpSpec], heads: tuple[int, int]) -> ModelSpec:
    """``heads``: attention's of queries and of keys in a file that does not say."""
    for part in ("attn_output_gate", "use_gated_attention"):
        f.refuse(part, unless=(True,), why="attention of this family has a gate")
    f = Fields(
        {**dict(zip(("num_attention_heads", "num_key_value_heads"), heads, strict=True)), **f.values}, f.where
    )
    head_dim = f.integer("head_dim", 256)
    rope = rope_from_config(_with_part(f), head_dim, partial=True)
    attn = attention(f, rope=rope, head_dim=head_dim, qk_norm="head", output_gate=True, **biases(f))
    recurrent, layers = _recurrent(f), []
    for kind, mlp in zip(_kinds(f, len(mlps)), mlps, strict=True):
        is_full = kind == "full_attention"
        layers.append(LayerSpec(attn if is_full else None, mlp, recurrent=None if is_full else recurrent))
    if not any(layer.attn for layer in layers):
        raise f.wrong("layer_types", "a list with one 'full_attention' at least")
    return assemble(f, family, layers, norm_plus_one=True)


def _with_part(f: Fields) -> Fields:
    """Return the fields with the part of a head that turns, a quarter where the file does not say."""
    parameters = f.nested("rope_parameters")
    if f.has("partial_rotary_factor") or (parameters is not None and parameters.has("partial_rotary_factor")):
        return f
    return Fields({**f.values, "partial_rotary_factor": 0.25}, f.where)


def _kinds(f: Fields, count: int) -> list[str]:
    every = f.integer("full_attention_interval", 4)
    default = ["linear_attention" if (index + 1) % every else "full_attention" for index in range(count)]
    kinds = f.texts("layer_types") or default
    if len(kinds) != count or set(kinds) - {"linear_attention", "full_attention"}:
        allowed = f"a list of num_hidden_layers = {count} entries 'linear_attention' or 'full_attention'"
        raise f.wrong("layer_types", allowed)
    return kinds


def _recurrent(f: Fields) -> RecurrentSpec:
    k_heads, v_heads = f.integer("linear_num_key_heads", 16), f.integer("linear_num_value_heads", 32)
    if v_heads % k_heads:
        raise f.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads = {k_heads}")
    if activation(f) != "silu":
        raise f.wrong("hidden_act", "'silu', which the convolution of this family has")
    k_dim, v_dim = f.integer("linear_key_head_dim", 128), f.integer("linear_value_head_dim", 128)
    if k_dim % 4:
        raise f.wrong("linear_key_head_dim", "a multiple of 4")
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    taps = f.integer("linear_conv_kernel_dim", 4, minimum=2)
    return RecurrentSpec("gated_delta", k_heads, v_heads, k_dim, v_dim, taps, channels)


def _sparse(f: Fields, num_experts: int, top_k: int) -> MlpSpec:
    shared = f.integer("shared_expert_intermediate_size", 512, minimum=0)
    moe = MoeSpec(
        num_experts=f.integer(
            "num_local_experts" if "num_local_experts" in f.values else "num_experts", num_experts
        ),
        top_k=f.integer("num_experts_per_tok", top_k),
        intermediate_size=f.integer("moe_intermediate_size", 512),
        normalize_topk=f.flag("norm_topk_prob", True),
        shared_intermediate_size=shared,
        shared_gate=shared > 0,
    )
    if moe.top_k > moe.num_experts:
        raise f.wrong("num_experts_per_tok", f"at most the {moe.num_experts} experts")
    return MlpSpec(moe.intermediate_size, activation(f), moe=moe)


def gated_attention(attn: AttentionSpec, hidden: int, stored: str) -> dict[str, tuple[Take, ...]]:
    """Return takes for q and its gate, which are stored head by head under ``stored``: a head's q, then its gate."""
    takes: dict[str, tuple[Take, ...]] = {}
    size = attn.head_dim
    rows = 2 * attn.num_heads * size
    for part, start in (("q", 0), ("gate", size)):
        pieces = tuple(range(row, row + size) for row in range(start, rows, 2 * size))
        for kind, shape in (("weight", (rows, hidden)), ("bias", (rows,))):
            if kind == "weight" or attn.qkv_bias:
                takes[f"attn.{part}.{kind}"] = (Take((stored + kind,), shape, pieces=pieces),)
    return takes


def _state_takes(spec: RecurrentSpec, prefix: str) -> dict[str, tuple[Take, ...]]:
    """Return takes for the convolution, whose rows are those of q, k and v, and for the rate of decay."""
    name, shape = f"{prefix}{_DELTA}conv1d.weight", (spec.conv_channels, 1, spec.conv_kernel)
    takes: dict[str, tuple[Take, ...]] = {
        f"delta.conv_{part}.weight": (
            Take((name,), shape, start=rows.start, stop=rows.stop, encoding="taps"),
        )
        for part, rows in _parts(spec)
    }
    takes["delta.rate"] = (Take((f"{prefix}{_DELTA}A_log",), (spec.num_v_heads,), encoding="rate"),)
    return takes


def _parts(spec: RecurrentSpec) -> Iterator[tuple[str, range]]:
    start = 0
    for part, width in (("q", spec.k_width), ("k", spec.k_width), ("v", spec.v_width)):
        yield part, range(start, start + width)
        start += width


def _by_parts(spec: ModelSpec, index: int, prefix: str) -> dict[str, tuple[Take, ...]]:
    """`LayerRules` of Qwen3.5."""
    r = spec.layers[index].recurrent
    if r is None:
        takes = gated_attention(spec.layers[index].attention, spec.hidden_size, f"{prefix}self_attn.q_proj.")
        return takes | expert_rules(spec, index, prefix)
    takes, hidden = _state_takes(r, prefix), spec.hidden_size
    name = f"{prefix}{_DELTA}in_proj_"
    for part, rows in _parts(r):
        take = Take((f"{name}qkv.weight",), (r.conv_channels, hidden), start=rows.start, stop=rows.stop)
        takes[f"delta.{part}.weight"] = (take,)
    for part, width in (("z", r.v_width), ("b", r.num_v_heads), ("a", r.num_v_heads)):
        takes[f"delta.{part}.weight"] = (Take((f"{name}{part}.weight",), (width, hidden)),)
    return takes | expert_rules(spec, index, prefix)


def _by_heads(spec: ModelSpec, index: int, prefix: str) -> dict[str, tuple[Take, ...]]:
    """`LayerRules` of Qwen3-Next: of each key head q, k, its values and their gates, and b and a of its values."""
    r = spec.layers[index].recurrent
    if r is None:
        takes = gated_attention(spec.layers[index].attention, spec.hidden_size, f"{prefix}self_attn.q_proj.")
        return takes | expert_rules(spec, index, prefix)
    takes, hidden = _state_takes(r, prefix), spec.hidden_size
    takes |= by_key_head(r, hidden, f"{prefix}{_DELTA}in_proj_qkvz.weight", INPUT_PARTS)
    takes |= by_key_head(r, hidden, f"{prefix}{_DELTA}in_proj_ba.weight", GATE_PARTS)
    return takes | expert_rules(spec, index, prefix)


def by_key_head(r: RecurrentSpec, hidden: int, stored: str, parts: str) -> dict[str, tuple[Take, ...]]:
    """Return takes of ``stored``, which has for each key head its rows of ``parts``, one part after the other."""
    per_key = r.num_v_heads // r.num_k_heads
    values = per_key * r.v_head_dim
    sizes = {"q": r.k_head_dim, "k": r.k_head_dim, "v": values, "z": values, "b": per_key, "a": per_key}
    step, start = sum(sizes[part] for part in parts), 0
    takes: dict[str, tuple[Take, ...]] = {}
    for part in parts:
        rows = range(start, r.num_k_heads * step, step)
        pieces = tuple(range(row, row + sizes[part]) for row in rows)
        takes[f"delta.{part}.weight"] = (Take((stored,), (r.num_k_heads * step, hidden), pieces=pieces),)
        start += sizes[part]
    return takes


def _map_with(rules: LayerRules, spec: ModelSpec) -> WeightMap:
    return replace(build_map(spec, NAMES, rules, ignore=_MTP), keys=_KEYS)


def weights(spec: ModelSpec) -> WeightMap:
    return _map_with(_by_parts, spec)


def next_weights(spec: ModelSpec) -> WeightMap:
    return _map_with(_by_heads, spec)


QWEN3_5 = Family("qwen3_5", read_qwen3_5, weights)
QWEN3_5_MOE = Family("qwen3_5_moe", read_qwen3_5_moe, weights)
QWEN3_NEXT = Family("qwen3_next", read_qwen3_next, next_weights)
