"""What llama.cpp's converter writes of layers with the gated delta rule, for `gguf_writer`."""

from __future__ import annotations

from functools import partial

import torch

from quire.modelspec import ModelSpec
from quire.recurrent_spec import RecurrentSpec


def delta_tensors(spec: ModelSpec, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(spec.layers):
        own, to = f"layers.{index}.", f"blk.{index}."
        if layer.attn is not None:
            size = layer.attn.head_dim
            q, gate = (weights[f"{own}attn.{name}.weight"].unflatten(0, (-1, size)) for name in ("q", "gate"))
            found[f"{to}attn_q.weight"] = torch.cat((q, gate), dim=1).flatten(0, 1)
        if (r := layer.recurrent) is None:
            continue
        read = partial(_stored, f"{own}delta.", weights, r, spec.family != "qwen3_next")
        d = r.v_head_dim
        found[f"{to}attn_qkv.weight"] = torch.cat((read("q.weight"), read("k.weight"), read("v.weight", d)))
        found[f"{to}attn_gate.weight"] = read("z.weight", d)
        taps = (read("conv_q.weight"), read("conv_k.weight"), read("conv_v.weight", d))
        found[f"{to}ssm_conv1d.weight"] = torch.cat(taps)
        found[f"{to}ssm_a"] = read("rate", 1)
        found[f"{to}ssm_dt.bias"] = read("dt_bias", 1)
        found[f"{to}ssm_norm.weight"] = read("norm.weight")
        found[f"{to}ssm_out.weight"] = read("o.weight", d, 1)
        b, a = read("b.weight", 1), read("a.weight", 1)
        if spec.family != "qwen3_next":
            found |= {f"{to}ssm_beta.weight": b, f"{to}ssm_alpha.weight": a}
        else:
            parts = [part.unflatten(0, (r.num_k_heads, -1)) for part in (b, a)]
            found[f"{to}ssm_ba.weight"] = torch.cat(parts, dim=1).flatten(0, 1)
    return found


def _stored(
    prefix: str,
    weights: dict[str, torch.Tensor],
    r: RecurrentSpec,
    is_tiled: bool,
    name: str,
    size: int = 0,
    dim: int = 0,
) -> torch.Tensor:
    """``size``: of a value head along ``dim``, 0 where the weight has none."""
    tensor = weights[prefix + name]
    return tiled(tensor, r, size, dim) if size and is_tiled else tensor


def tiled(tensor: torch.Tensor, r: RecurrentSpec, size: int, dim: int) -> torch.Tensor:
    """Put the first value head of every key head first, then the second ones, along ``dim``."""
    heads = tensor.unflatten(dim, (r.num_k_heads, -1, size))
    return heads.transpose(dim, dim + 1).flatten(dim, dim + 2).contiguous()
