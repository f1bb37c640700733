"""Random heads on disk in their published layouts, and what they compute, written again in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

LLAMA = {  # of a layer, with the sizes below
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
}


def _random(seed: int, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        found[name] = 1 + 0.1 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
    return found


def eagle(
    hidden: int, vocab: int, head_dim: int, *, bias: bool = True
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """EAGLE-1: names at the top, no input_layernorm, an embedding that repeats the model's."""
    names = _layer("layers.0.", hidden, hidden, head_dim) | {"fc.weight": (hidden, 2 * hidden)}
    names |= {"fc.bias": (hidden,)} if bias else {}
    stored = _random(1, **names, **{"embed_tokens.weight": (vocab, hidden)})
    del stored["layers.0.input_layernorm.weight"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "vocab_size": vocab,
        "head_dim": head_dim,
    }
    return LLAMA | config, stored


def eagle3(
    hidden: int, vocab: int, head_dim: int, taps: tuple[int, ...], few: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """EAGLE-3: every second of the model's ids, from the first on."""
    names = _layer("midlayer.", hidden, 2 * hidden, head_dim)
    names |= {"fc.weight": (hidden, 3 * hidden), "norm.weight": (hidden,), "lm_head.weight": (few, hidden)}
    stored = _random(2, **names, **{"midlayer.hidden_norm.weight": (hidden,)})
    stored["d2t"] = torch.arange(few)  # id 2 · row is row + row
    stored["t2d"] = torch.arange(vocab) % 2 == 0
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": hidden,
        "vocab_size": vocab,
        "draft_vocab_size": few,
        "head_dim": head_dim,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(taps)},
    }
    return LLAMA | config, stored


def medusa(
    hidden: int, vocab: int, *, heads: int = 3, blocks: int = 1, vllm: bool = False, own: bool = True
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The published names, or those of vLLM, with or without output matrices of their own."""
    names: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for block in range(blocks):
            of = f"blocks.{head}.layers.{block}" if vllm else f"{head}.{block}.linear"
            names[f"{of}.weight"] = (hidden, hidden)
            names |= {} if vllm else {f"{of}.bias": (hidden,)}
        if own:
            names[f"lm_heads.{head}.weight" if vllm else f"{head}.{blocks}.weight"] = (vocab, hidden)
    return {"medusa_num_heads": heads, "medusa_num_layers": blocks}, _random(3, **names)


def write(
    folder: Path, config: dict[str, Any], stored: dict[str, Tensor], file: str = "model.safetensors"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / file)
    return folder


def _layer(prefix: str, hidden: int, inputs: int, head_dim: int) -> dict[str, tuple[int, ...]]:
    heads, kv_heads, inter = (
        LLAMA[key] for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    )
    shapes = {
        "self_attn.q_proj": (heads * head_dim, inputs),
        "self_attn.k_proj": (kv_heads * head_dim, inputs),
        "self_attn.v_proj": (kv_heads * head_dim, inputs),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (inter, hidden),
        "mlp.up_proj": (inter, hidden),
        "mlp.down_proj": (hidden, inter),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}  # type: ignore[misc]


def norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def eagle_rows(
    stored: dict[str, Tensor], embeddings: Tensor, hidden: Tensor, head_dim: int, layer: str
) -> Tensor:
    """All rows of EAGLE (``layer`` "layers.0.") or EAGLE-3 ("midlayer."): ``[n, hidden]`` each → ``[n, hidden]``.

    Row j has the embedding of token j + 1, the hidden state of token j (of EAGLE-3: behind fc), and position j.
    """
    w = {name.removeprefix(layer): tensor for name, tensor in stored.items()}
    if layer == "midlayer.":
        residual = hidden
        x = torch.cat(
            [norm(embeddings, w["input_layernorm.weight"]), norm(hidden, w["hidden_norm.weight"])], dim=-1
        )
    else:
        x = residual = F.linear(torch.cat([embeddings, hidden], dim=-1), w["fc.weight"], w.get("fc.bias"))
    q, k, v = (
        F.linear(x, w[f"self_attn.{n}_proj.weight"]).unflatten(-1, (-1, head_dim)).transpose(0, 1)
        for n in "qkv"
    )
    angles = torch.outer(torch.arange(len(x)), 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)).repeat(
        1, 2
    )

    def rotate(y: Tensor) -> Tensor:
        first, second = y.chunk(2, dim=-1)
        return y * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()

    repeats = q.shape[0] // k.shape[0]
    out = F.scaled_dot_product_attention(
        rotate(q), rotate(k).repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0), is_causal=True
    )
    residual = residual + F.linear(out.transpose(0, 1).flatten(1), w["self_attn.o_proj.weight"])
    x = norm(residual, w["post_attention_layernorm.weight"])
    gate, up = F.linear(x, w["mlp.gate_proj.weight"]), F.linear(x, w["mlp.up_proj.weight"])
    return residual + F.linear(F.silu(gate) * up, w["mlp.down_proj.weight"])
