"""`WeightMap`: where a checkpoint keeps each canonical weight, as data; `Family`: what each module here defines.

A `Take` reads one tensor (or one per expert, stacked) and cuts a part of it. Cuts along rows are views, so a fused
``qkv_proj`` costs no copy. Several takes for one weight are alternatives, since checkpoints on the hub and those of
transformers 5 name experts differently: the first take whose tensors all exist is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from quire.families.shape import Fields
from quire.modelspec import ModelSpec, weight_shapes

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Take:
    """Read ``names`` (each of ``shape`` in the checkpoint), stack, swap, slice: the canonical weight.

    Order: each tensor is checked against ``shape`` → stacked on a new first dimension when ``stacked`` → the last
    two dimensions swapped when ``transpose`` → ``[start:stop:step]`` of dimension ``dim``.
    ``pieces``: in place of such a slice, these ranges of dimension ``dim``, one after the other: heads that are stored
    with what belongs to them between, or in another order.
    ``unpermute_heads``: the rows of each head are stored in the pairwise order of llama.cpp's RoPE, and are restored.
    Without ``names`` it is zeros: a bias that a checkpoint may leave out.
    ``encoding`` "halves": ``names`` are the keys' half of MLA's ``kv_b``, transposed, and the values'; ``shape`` is
    (heads, rows of a head's keys, of its values, in).
    ``encoding`` "mxfp4": ``names`` are the blocks and the scales of one tensor of ``shape``; its rows may be cut.
    ``encoding`` "rate": −exp of what is stored, as a vector.
    ``encoding`` "taps": a convolution that is stored ``[rows, 1, taps]``.
    ``encoding`` "flat": a vector that is stored with more dimensions.
    """

    names: tuple[str, ...]
    shape: Shape
    stacked: bool = False
    transpose: bool = False
    dim: int = 0
    start: int = 0
    stop: int | None = None
    step: int = 1
    unpermute_heads: int = 0
    encoding: Literal["plain", "mxfp4", "halves", "rate", "taps", "flat"] = "plain"
    pieces: tuple[range, ...] = ()


def stored_shapes(take: Take) -> tuple[Shape, ...]:
    """Return the shape that each of ``take.names`` has in the checkpoint."""
    if take.encoding in ("plain", "rate", "taps", "flat"):
        return (take.shape,) * len(take.names)
    if take.encoding == "halves":
        heads, of_keys, of_values, in_features = take.shape
        return (heads, in_features, of_keys), (heads, of_values, in_features)
    *rows, columns = take.shape
    return (*rows, columns // 32, 16), (*rows, columns // 32)


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Alternatives for every canonical weight, and names that a checkpoint may hold besides (regular expressions)."""

    sources: Mapping[str, tuple[Take, ...]]
    ignore: tuple[str, ...]
    num_layers: int = 0  # the model's, for errors
    # The end of a tensor's name → keys of config.json that decide about it in this family alone, for errors.
    keys: tuple[tuple[str, tuple[str, ...]], ...] = ()


# (spec, layer index, prefix of the layer's names in the checkpoint) -> takes by the canonical name after "layers.{i}."
LayerRules = Callable[[ModelSpec, int, str], dict[str, tuple[Take, ...]]]

# Llama's names, which most other families kept, after "model.layers.{i}.".
LLAMA_NAMES: Mapping[str, str] = {
    "attn_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "attn.q_norm.weight": "self_attn.q_norm.weight",
    "attn.k_norm.weight": "self_attn.k_norm.weight",
    "attn.sinks": "self_attn.sinks",
    "moe.router.weight": "mlp.gate.weight",
    **{
        f"attn.{n}.{kind}": f"self_attn.{n}_proj.{kind}"
        for n in ("q", "k", "v", "o")
        for kind in ("weight", "bias")
    },
    **{
        f"mlp.{n}.{kind}": f"mlp.{n}_proj.{kind}"
        for n in ("gate", "up", "down")
        for kind in ("weight", "bias")
    },
}

# Around both blocks (Gemma 2 and 3).
SANDWICH_NORMS: Mapping[str, str] = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_post_norm.weight": "post_attention_layernorm.weight",
    "mlp_norm.weight": "pre_feedforward_layernorm.weight",
    "mlp_post_norm.weight": "post_feedforward_layernorm.weight",
}

TOP_NAMES: Mapping[str, str] = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}

# What a checkpoint may hold and no answer needs: value heads of trainers, scales of quantized caches, and what sees and
# hears in a model of which the text decoder runs.
UNUSED = (
    r"(model\.)?(vision_tower|audio_tower|multi_modal_projector|embed_vision|embed_audio|visual|vision_model|connector)\..*",
    r"(v_head|value_head|reward_head|score)\..*",
    r".*\.self_attn\.(\w+\.)?(q|k|v|kv|prob_output)_(scale|zero_point)",
    r".*\.[kv]_proj\.output_scale",
)
# Buffers that older versions of transformers saved; Quire computes them.
COMPUTED = (r".*rotary_emb\.inv_freq", r".*rotary_emb\.(cos|sin)_cached", r".*\.masked_bias")


def build_map(
    spec: ModelSpec, names: Mapping[str, str] = LLAMA_NAMES, rules: LayerRules | None = None,
    ignore: tuple[str, ...] = (), *, top: Mapping[str, str] = TOP_NAMES, layer_prefix: str = "model.layers.{}.",
) -> WeightMap:  # fmt: skip
    """Map every weight of ``spec``: by ``rules`` where they name it, otherwise by ``names``."""
    shapes = weight_shapes(spec)
    special: dict[str, tuple[Take, ...]] = {}
    for index in range(spec.num_layers if rules else 0):
        assert rules is not None
        for name, takes in rules(spec, index, layer_prefix.format(index)).items():
            special[f"layers.{index}.{name}"] = takes
    sources: dict[str, tuple[Take, ...]] = {}
    for canonical, shape in shapes.items():
        if canonical in special:
            sources[canonical] = special[canonical]
            continue
        if canonical.startswith("layers."):
            _, index_text, rest = canonical.split(".", 2)
            stored = layer_prefix.format(index_text) + names[rest]
        else:
            stored = top[canonical]
        sources[canonical] = (Take((stored,), shape),)
    if spec.tie_word_embeddings:
        ignore = (*ignore, top["lm_head.weight"].replace(".", r"\."))  # some tied checkpoints save it too
    return WeightMap(sources, (*COMPUTED, *UNUSED, *ignore), spec.num_layers)


def expert_takes(
    spec: ModelSpec, index: int, folder: str, names: tuple[str, str, str], fused: str
) -> dict[str, tuple[Take, ...]]:
    """Return takes for the experts of one layer: one tensor per expert (hub), or fused over experts (transformers 5).

    ``folder``: "…mlp.experts." with ``names`` for (gate, up, down) after "{expert}."; ``fused``: the folder of
    ``gate_up_proj [experts, 2 · inter, hidden]`` (gate first) and ``down_proj [experts, hidden, inter]``.
    """
    moe = spec.layers[index].mlp.moe
    assert moe is not None
    count, inter, hidden = moe.num_experts, moe.intermediate_size, spec.hidden_size
    takes: dict[str, tuple[Take, ...]] = {}
    for position, (part, name) in enumerate(zip(("gate", "up", "down"), names, strict=True)):
        single = (hidden, inter) if part == "down" else (inter, hidden)
        per_expert = Take(tuple(f"{folder}{e}.{name}.weight" for e in range(count)), single, stacked=True)
        if part == "down":
            fused_take = Take((f"{fused}down_proj",), (count, hidden, inter))
        else:
            start = position * inter
            fused_take = Take(
                (f"{fused}gate_up_proj",), (count, 2 * inter, hidden), dim=1, start=start, stop=start + inter
            )
        takes[f"moe.{part}.weight"] = (per_expert, fused_take)
    return takes


def expert_rules(spec: ModelSpec, index: int, prefix: str) -> dict[str, tuple[Take, ...]]:
    """`LayerRules` for experts with Llama's names of the three matrices, in the layers that have experts."""
    if spec.layers[index].mlp.moe is None:
        return {}
    folder = f"{prefix}mlp.experts."
    return expert_takes(spec, index, folder, ("gate_proj", "up_proj", "down_proj"), folder)


def fused_gate_up(spec: ModelSpec, index: int, name: str) -> dict[str, tuple[Take, ...]]:
    """Return takes for a dense block's gate and up: the first and the second half of the rows of ``name``."""
    inter = spec.layers[index].mlp.intermediate_size
    fused, shape = (name,), (2 * inter, spec.hidden_size)
    return {
        "mlp.gate.weight": (Take(fused, shape, stop=inter),),
        "mlp.up.weight": (Take(fused, shape, start=inter, stop=2 * inter),),
    }


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models: how its configuration is read and how its checkpoints name their tensors."""

    name: str  # ModelSpec.family
    read: Callable[[Fields], ModelSpec]
    weights: Callable[[ModelSpec], WeightMap]
    quantizations: tuple[str, ...] = ()  # supported quantization_config.quant_method
