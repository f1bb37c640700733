"""llama.cpp's tensor names → canonical weights.

Files of some architectures keep the rows of q and k in the pairwise order of llama.cpp's RoPE; the loader restores
them. Experts lie stacked, ``[experts, out, in]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quire.families.gguf_delta import DELTA
from quire.families.gguf_delta import NAMES as DELTA_NAMES
from quire.families.gguf_gemma4 import NAMES as GEMMA4_NAMES
from quire.families.gguf_gemma4 import TOP as GEMMA4_TOP
from quire.families.gguf_gemma4 import shared_tensors
from quire.families.gguf_hybrids import HYBRIDS, hybrid_rules
from quire.families.gguf_hybrids import NAMES as HYBRID_NAMES
from quire.families.llama import fused_takes
from quire.families.weights import Take, WeightMap, build_map, fused_gate_up
from quire.modelspec import ModelSpec

Takes = dict[str, tuple[Take, ...]]
_TOP = {
    "embed.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
SHARED_GATE = "ffn_gate_inp_shexp.weight"
XIELU_ALPHAS = ("xielu.alpha_p", "xielu.alpha_n")  # keys
_PROJECTIONS = ("gate", "up", "down")
_KINDS = ("weight", "bias")
_NAMES: Mapping[str, str] = {
    "attn_norm.weight": "attn_norm.weight",
    "mlp_norm.weight": "ffn_norm.weight",
    "attn_post_norm.weight": "post_attention_norm.weight",
    "mlp_post_norm.weight": "post_ffw_norm.weight",
    "attn.q_norm.weight": "attn_q_norm.weight",
    "attn.k_norm.weight": "attn_k_norm.weight",
    "attn.sinks": "attn_sinks.weight",
    "attn.q_a.weight": "attn_q_a.weight",
    "attn.q_a_norm.weight": "attn_q_a_norm.weight",
    "attn.q_b.weight": "attn_q_b.weight",
    "attn.kv_a.weight": "attn_kv_a_mqa.weight",
    "attn.kv_a_norm.weight": "attn_kv_a_norm.weight",
    "moe.correction_bias": "exp_probs_b.bias",
    "moe.shared_gate.weight": SHARED_GATE,
    **{f"moe.router.{kind}": f"ffn_gate_inp.{kind}" for kind in _KINDS},
    **{f"attn.{n}.{kind}": f"attn_{n}.{kind}" for n in ("q", "k", "v") for kind in _KINDS},
    **{f"attn.o.{kind}": f"attn_output.{kind}" for kind in _KINDS},
    **{f"mlp.{n}.{kind}": f"ffn_{n}.{kind}" for n in _PROJECTIONS for kind in _KINDS},
    **{f"moe.{n}.{kind}": f"ffn_{n}_exps.{kind}" for n in _PROJECTIONS for kind in _KINDS},
    **{f"moe.shared.{n}.weight": f"ffn_{n}_shexp.weight" for n in _PROJECTIONS},
}
_ROPE_TENSORS = (r"rope_freqs\.weight", r"rope_factors_(long|short)\.weight", r"blk\.\d+\.attn_rot_embd.*")


def gguf_weight_map(spec: ModelSpec, metadata: Mapping[str, Any]) -> WeightMap:
    """Return where the GGUF file with this ``metadata`` keeps each canonical weight."""
    arch = str(metadata.get("general.architecture"))
    names, top = {**_NAMES, **_NAMES_OF.get(arch, {})}, {**_TOP, **_TOP_OF.get(arch, {})}
    ignore = (*_ROPE_TENSORS, *drafting_tensors(spec, metadata), *shared_tensors(spec))
    weight_map = build_map(spec, names, _RULES.get(arch), ignore, top=top, layer_prefix="blk.{}.")
    sources = {
        name: (*takes, Take((), takes[0].shape)) if name.endswith(".bias") else takes  # each may be left out
        for name, takes in weight_map.sources.items()
    }
    return replace(weight_map, sources=sources)


def drafting_tensors(spec: ModelSpec, metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Return patterns of the tensors of layers for multi-token prediction, which come after the decoder's."""
    count = metadata.get(f"{metadata.get('general.architecture')}.nextn_predict_layers") or 0
    return tuple(rf"blk\.{spec.num_layers + index}\..*" for index in range(int(count)))


def _pairwise_rules(spec: ModelSpec, index: int, prefix: str) -> Takes:
    a = spec.layers[index].attention
    takes: Takes = {}
    for name, heads in (("q", a.num_heads), ("k", a.num_kv_heads)):
        rows = heads * a.head_dim
        for kind, shape in (("weight", (rows, spec.hidden_size)), ("bias", (rows,))):
            takes[f"attn.{name}.{kind}"] = (
                Take((f"{prefix}attn_{name}.{kind}",), shape, unpermute_heads=heads),
            )
    return takes


def _phi3_rules(spec: ModelSpec, index: int, prefix: str) -> Takes:
    return fused_takes(spec, index, f"{prefix}attn_qkv.weight", f"{prefix}ffn_up.weight")


def _glm4_rules(spec: ModelSpec, index: int, prefix: str) -> Takes:
    return fused_gate_up(spec, index, f"{prefix}ffn_up.weight")


def _xielu_rules(spec: ModelSpec, index: int, prefix: str) -> Takes:
    """The learned numbers of Apertus' activation are lists in the metadata, with one for each layer."""
    return {
        f"mlp.{key.removeprefix('xielu.')}": (Take((key,), (spec.num_layers,), start=index, stop=index + 1),)
        for key in XIELU_ALPHAS
    }


def _latent_rules(spec: ModelSpec, index: int, prefix: str) -> Takes:
    """``kv_b`` is stored whole (older files), or as its two halves per head, that of the keys transposed."""
    a = spec.layers[index].attention
    undivided = (a.num_heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank)
    halves = (a.num_heads, a.qk_nope_head_dim, a.v_head_dim, a.kv_lora_rank)
    return {
        "attn.kv_b.weight": (
            Take((f"{prefix}attn_kv_b.weight",), undivided),
            Take((f"{prefix}attn_k_b.weight", f"{prefix}attn_v_b.weight"), halves, encoding="halves"),
        )
    }


_NEMOTRON_NAMES = {**HYBRID_NAMES, "mlp_norm.weight": "attn_norm.weight"}
_NORM_BEFORE_MLP = {"mlp_norm.weight": "post_attention_norm.weight"}
# Names of an architecture that differ.
_NAMES_OF: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("gpt-oss", "seed_oss", "glm4moe"), _NORM_BEFORE_MLP),
    **dict.fromkeys(HYBRIDS, HYBRID_NAMES),
    **dict.fromkeys(DELTA, DELTA_NAMES),
    "gemma4": GEMMA4_NAMES,
    "nemotron_h": _NEMOTRON_NAMES,
    "nemotron_h_moe": _NEMOTRON_NAMES,
}
# The last norm of LFM2, in spite of its name.
_TOP_OF: Mapping[str, Mapping[str, str]] = {
    **{arch: {"norm.weight": "token_embd_norm.weight"} for arch in ("lfm2", "lfm2moe")},
    "gemma4": GEMMA4_TOP,
}
_RULES: Mapping[str, Callable[[ModelSpec, int, str], Takes]] = {
    "llama": _pairwise_rules,
    "granite": _pairwise_rules,
    "smollm3": _pairwise_rules,
    "phi3": _phi3_rules,
    "glm4": _glm4_rules,
    "apertus": _xielu_rules,
    "deepseek2": _latent_rules,
    **dict.fromkeys(HYBRIDS, hybrid_rules),
}
