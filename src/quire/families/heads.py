"""Where checkpoints of heads (`HeadSpec`) keep their weights, and what their configurations say."""

from __future__ import annotations

import re
from collections.abc import Mapping

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.families.head_spec import LAYER, HeadMethod, HeadSpec
from quire.families.rope import rope_from_config
from quire.families.shape import Fields, attention, dense, head_dim_of
from quire.families.weights import COMPUTED, LLAMA_NAMES, Take, WeightMap
from quire.modelspec import LayerSpec, ModelSpec

Shapes = Mapping[str, tuple[int, ...]]  # stored name → shape

_MEDUSA = re.compile(r"(?:medusa_heads\.)?(?:blocks\.(\d+)\.layers\.(\d+)|(\d+)\.(\d+)\.linear)\.weight")


def method_of(config: Mapping[str, object], stored: Shapes) -> HeadMethod | None:
    """Return what kind of heads a checkpoint holds; None: it is a model."""
    if "d2t" in stored or any(name.endswith("hidden_norm.weight") for name in stored):
        return "eagle3"
    if any(name.removeprefix("model.") == "fc.weight" for name in stored):
        return "eagle"
    if any(_MEDUSA.fullmatch(name) for name in stored) or "medusa_num_heads" in config:
        return "medusa"
    return None


def read_heads(f: Fields, stored: Shapes, target: ModelSpec) -> tuple[HeadSpec, WeightMap]:
    """Return the heads of a folder's ``config.json`` and tensors, for the model ``target``.

    Raises:
        ModelLoadError, UnsupportedModelError: they are not for this model, or of a kind that is not read.
    """
    method = method_of(f.values, stored)
    if method is None:
        raise UnsupportedModelError(
            f"{f.where}: the tensors are no heads that are read: EAGLE has fc.weight, EAGLE-3 also hidden_norm.weight, "
            f"Medusa blocks.0.layers.0.weight or 0.0.linear.weight; the first here is {min(stored, default='none')}."
        )
    return _medusa(f, stored, target) if method == "medusa" else _eagle(f, stored, target, method)


def _eagle(f: Fields, stored: Shapes, target: ModelSpec, method: HeadMethod) -> tuple[HeadSpec, WeightMap]:
    f.refuse("num_hidden_layers", unless=(1,), why="a draft of one layer")
    f.refuse("norm_before_residual", unless=(False,), why="the published EAGLE-3 heads")
    _same(f, "hidden_size", target.hidden_size)
    _same(f, "vocab_size", target.vocab_size)
    prefix = "model." if any(name.startswith("model.") for name in stored) else ""
    layer = prefix + ("midlayer." if f"{prefix}midlayer.mlp.up_proj.weight" in stored else "layers.0.")
    bias = f"{layer}self_attn.q_proj.bias" in stored
    attn = attention(
        f,
        rope=rope_from_config(f, head_dim_of(f)),
        qkv_bias=bias,
        o_bias=f"{layer}self_attn.o_proj.bias" in stored,
    )
    spec = LayerSpec(attn, dense(f, bias=f"{layer}mlp.up_proj.bias" in stored))
    taps = _taps(f, target) if method == "eagle3" else ()
    ids = stored.get("lm_head.weight", (target.vocab_size,))[0]
    heads = HeadSpec(
        method, target.hidden_size, target.vocab_size, _one_layer(f, target, spec),
        fc_bias=f"{prefix}fc.bias" in stored, taps=taps, draft_vocab_size=ids if taps else 0,
    )  # fmt: skip
    if taps and f.integer("draft_vocab_size", target.vocab_size) != ids:
        raise f.wrong("draft_vocab_size", f"the rows of lm_head.weight, {ids}")
    if taps and ids < target.vocab_size and stored.get("d2t") != (ids,):
        raise ModelLoadError(
            f"{f.where}: the head knows {ids} of {target.vocab_size} ids, and d2t, which says which, has the shape "
            f"{stored.get('d2t')} instead of {(ids,)}."
        )
    names = {LAYER + rest: layer + name for rest, name in LLAMA_NAMES.items()}
    names |= {"hidden_norm.weight": f"{layer}hidden_norm.weight", "norm.weight": f"{prefix}norm.weight"}
    names |= {n: prefix + n for n in ("fc.weight", "fc.bias")} | {"lm_head.weight": "lm_head.weight"}
    # Where they are stored, they are the model's own.
    ignore: tuple[str, ...] = (r"d2t", r"t2d", r"(model\.)?embed_tokens\.weight", *COMPUTED)
    if not taps:
        ignore = (*ignore, r"lm_head\.weight")
    return heads, map_of(heads, names, ignore)


def _taps(f: Fields, target: ModelSpec) -> tuple[int, ...]:
    """Return three layers of ``target``: those that the configuration names, or a low, a middle and a high one."""
    nested = f.nested("eagle_config") or f
    taps = nested.integers("eagle_aux_hidden_state_layer_ids")
    count = target.num_layers
    taps = tuple(sorted(set(taps or (2, count // 2, count - 3))))
    if len(taps) != 3 or any(not 0 <= layer < count for layer in taps):
        raise ModelLoadError(
            f"{f.where}: eagle_aux_hidden_state_layer_ids = {list(taps)} must be three layers of the model, which has "
            f"layers 0…{count - 1}."
        )
    return taps


def _medusa(f: Fields, stored: Shapes, target: ModelSpec) -> tuple[HeadSpec, WeightMap]:
    """The layout of the published heads ("0.0.linear.weight", "0.1.weight"), or that of vLLM ("blocks.0.layers.0")."""
    for key in ("hidden_size", "vocab_size"):
        if f.has(key):
            _same(f, key, getattr(target, key))
    if "token_map" in stored:
        raise UnsupportedModelError(
            f"{f.where}: Medusa heads with a token_map are not supported: their ids are few."
        )
    matches = [match for match in map(_MEDUSA.fullmatch, stored) if match is not None]
    if not matches:
        raise ModelLoadError(
            f"{f.where}: there is no residual block: 0.0.linear.weight or blocks.0.layers.0.weight."
        )
    places = [(int(m[1] or m[3]), int(m[2] or m[4])) for m in matches]
    num_heads, num_blocks = (1 + max(place) for place in zip(*places, strict=True))
    prefix = "medusa_heads." if any(name.startswith("medusa_heads.") for name in stored) else ""
    vllm = matches[0][1] is not None
    names: dict[str, str] = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            of = f"blocks.{head}.layers.{block}" if vllm else f"{head}.{block}.linear"
            names |= {f"blocks.{head}.{block}.{kind}": f"{prefix}{of}.{kind}" for kind in ("weight", "bias")}
        output = f"lm_heads.{head}.weight" if vllm else f"{head}.{num_blocks}.weight"
        names[f"lm_heads.{head}.weight"] = prefix + output
    heads = HeadSpec(
        "medusa", target.hidden_size, target.vocab_size, num_heads=num_heads, num_blocks=num_blocks,
        block_bias=names["blocks.0.0.bias"] in stored, own_outputs=names["lm_heads.0.weight"] in stored,
    )  # fmt: skip
    for key, count in (("medusa_num_heads", num_heads), ("num_heads", num_heads)):
        if f.has(key) and f.integer(key) < count:
            raise f.wrong(key, f"at least {count}, the heads that are stored")
    return heads, map_of(heads, names, COMPUTED)


def map_of(
    heads: HeadSpec, names: Mapping[str, str], ignore: tuple[str, ...],
    special: Mapping[str, tuple[Take, ...]] | None = None,
) -> WeightMap:  # fmt: skip
    """Return where the weights of ``heads`` are stored: ``special`` where it has one, else under ``names``."""
    taken = special or {}
    sources = {
        name: taken[name] if name in taken else (Take((names[name],), shape),)
        for name, shape in heads.shapes().items()
    }
    return WeightMap(sources, ignore)


def _one_layer(f: Fields, target: ModelSpec, layer: LayerSpec) -> ModelSpec:
    return ModelSpec(
        target.family, target.architecture, target.vocab_size, target.hidden_size, (layer,),
        norm_eps=f.number("rms_norm_eps", 1e-6), dtype=target.dtype,
        max_position_embeddings=target.max_position_embeddings,
    )  # fmt: skip


def _same(f: Fields, key: str, value: int) -> None:
    if f.integer(key) != value:
        raise ModelLoadError(
            f"{f.where}: {key} = {f.integer(key)}, and the model has {value}: these heads belong to another model."
        )
