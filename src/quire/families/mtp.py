"""The layer for multi-token prediction inside a checkpoint, which drafts: DeepSeek-V3's, Qwen3-Next's and Qwen3.5's.

It shares the embedding and the output matrix with the model (arXiv:2412.19437, §2.2). Where a checkpoint has several
layers, the first one makes every draft. Names in the checkpoint:

    DeepSeek-V3   model.layers.{n}.  enorm, hnorm, eh_proj, shared_head.norm, and a layer of the model's kind
    Qwen          mtp.               pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm, and layers.0, which attends

A draft behind a draft reads the hidden state that the layer gave: DeepSeek-V3's before its last norm, Qwen's after it.
"""

from __future__ import annotations

from dataclasses import replace

from quire.errors import UnsupportedModelError
from quire.families import deepseek, qwen_hybrid
from quire.families.head_spec import LAYER, HeadSpec
from quire.families.heads import map_of
from quire.families.shape import Fields
from quire.families.weights import Take, WeightMap, expert_rules
from quire.modelspec import ModelSpec

# Family → the key that counts its layers for multi-token prediction, and the count where a file does not say.
_COUNTS = {
    "deepseek_v3": ("num_nextn_predict_layers", 0),
    "qwen3_5": ("mtp_num_hidden_layers", 0),
    "qwen3_5_moe": ("mtp_num_hidden_layers", 0),
    "qwen3_next": ("num_nextn_predict_layers", 1),
}


def read_mtp(f: Fields, target: ModelSpec) -> tuple[HeadSpec, WeightMap]:
    """Return the layer for multi-token prediction of the checkpoint of ``target``; ``f``: of its text decoder.

    Raises:
        UnsupportedModelError: the checkpoint has none, or its family's is not read.
    """
    key, count = _COUNTS.get(target.family, ("", 0))
    if not key:
        raise UnsupportedModelError(
            f"{f.where}: speculate = 'mtp' needs a layer for multi-token prediction, which is read of DeepSeek-V3, "
            "Qwen3-Next and Qwen3.5; use 'draft', 'ngram', or heads ('eagle', 'medusa')."
        )
    if f.integer(key, count, minimum=0) < 1:
        raise UnsupportedModelError(
            f"{f.where}: speculate = 'mtp' needs a layer for multi-token prediction, and {key} says that this "
            "checkpoint has none; use 'draft', 'ngram', or heads ('eagle', 'medusa')."
        )
    return _deepseek(target) if target.family == "deepseek_v3" else _qwen(f, target)


def _deepseek(target: ModelSpec) -> tuple[HeadSpec, WeightMap]:
    model = replace(target, layers=target.layers[-1:])
    heads = HeadSpec("mtp", target.hidden_size, target.vocab_size, model)
    layer = f"model.layers.{target.num_layers}."
    names = {LAYER + rest: layer + name for rest, name in deepseek.NAMES.items()}
    names |= {"embed_norm.weight": f"{layer}enorm.weight", "hidden_norm.weight": f"{layer}hnorm.weight"}
    names |= {"fc.weight": f"{layer}eh_proj.weight", "norm.weight": f"{layer}shared_head.norm.weight"}
    return heads, map_of(heads, names, (".*",), _under_layer(expert_rules(model, 0, layer)))


def _qwen(f: Fields, target: ModelSpec) -> tuple[HeadSpec, WeightMap]:
    f.refuse("mtp_use_dedicated_embeddings", unless=(False,), why="a draft layer reads the model's embedding")
    last = next(layer for layer in reversed(target.layers) if layer.attn is not None)
    model = replace(target, layers=(last,))
    heads = HeadSpec("mtp", target.hidden_size, target.vocab_size, model, feeds_norm=True)
    layer = "mtp.layers.0."
    names = {LAYER + rest: layer + name for rest, name in qwen_hybrid.NAMES.items()}
    names |= {"embed_norm.weight": "mtp.pre_fc_norm_embedding.weight", "fc.weight": "mtp.fc.weight"}
    names |= {"hidden_norm.weight": "mtp.pre_fc_norm_hidden.weight", "norm.weight": "mtp.norm.weight"}
    takes = qwen_hybrid.gated_attention(last.attention, target.hidden_size, f"{layer}self_attn.q_proj.")
    return heads, map_of(heads, names, (".*",), _under_layer(takes | expert_rules(model, 0, layer)))


def _under_layer(takes: dict[str, tuple[Take, ...]]) -> dict[str, tuple[Take, ...]]:
    return {LAYER + name: alternatives for name, alternatives in takes.items()}
