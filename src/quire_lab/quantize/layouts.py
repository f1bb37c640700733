"""How a rounded matrix lies in a file, and the ``quantization_config`` that says so, by the name of the format.

    compressed-tensors   pack-quantized: words along the inputs ``[out, in / 8]``, zero points along the outputs
                         ``[out / 8, groups]``; int-quantized and float-quantized: int8 or e4m3 as it is, activations
                         of the same with a scale per token
    gptq                 words along the inputs ``[in / 8, out]``, zero points minus 1 along the outputs
                         ``[groups, out / 8]``
    bnb                  nf4 in bytes (see `quire_lab.quantize.nf4`)
    gguf                 blocks, which are put into one file at the end
    awq                  words along the outputs ``[in, out / 8]`` in an order of their own, zero points the same

The number in a word is q + 2^(bits − 1), the lowest bits first. Sources: compressed-tensors' ``pack_to_int32``,
AutoGPTQ's ``QuantLinear.pack``, AutoAWQ's ``WQLinear_GEMM``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.quant.stored import AWQ_ORDER
from quire_lab.quantize.gguf.blocks import block_bytes
from quire_lab.quantize.grid import Rounded
from quire_lab.quantize.nf4 import nf4_config, nf4_parts
from quire_lab.quantize.scheme import Scheme

WORD = torch.iinfo(torch.int32).bits
Schemes = Mapping[str, Scheme | None]


@dataclass(frozen=True, slots=True)
class Layout:
    """``parts``: a matrix → suffix → tensor; ``config``: (schemes, modules that stay plain) → quantization_config.

    ``mixes``: whether matrices may have different schemes.
    """

    parts: Callable[[Rounded], dict[str, Tensor]]
    config: Callable[[Schemes, Sequence[str]], dict[str, Any]]
    mixes: bool


def pack(numbers: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """``numbers [rows, n]``, from 0 on → int32 words ``[rows, n · bits / 32]``; the last word is filled with zeros.

    ``order``: for each number of a word the place that it takes, from the lowest bits on.
    """
    per_word = WORD // bits
    padded = torch.nn.functional.pad(numbers.to(torch.int64), (0, -numbers.shape[1] % per_word))
    places = torch.tensor(order or range(per_word), dtype=torch.int64) * bits
    words = torch.unflatten(padded, 1, (-1, per_word)) << places
    return words.sum(-1).to(torch.int32)  # the low 32 bits


def _unsigned(rounded: Rounded) -> tuple[Tensor, Tensor]:
    """Return integers ``[out, in]`` and zero points ``[out, groups]``, from 0 on."""
    lowest = rounded.scheme.lowest
    zero = torch.zeros_like(rounded.grid.scale) if rounded.grid.zero is None else rounded.grid.zero
    return rounded.q.to(torch.int16) - lowest, (zero - lowest).to(torch.int16)


def _compressed_tensors(rounded: Rounded) -> dict[str, Tensor]:
    scheme, scale = rounded.scheme, rounded.grid.scale.half()
    if scheme.activations:
        # Of square blocks all rows have the same scales.
        scales = rounded.grid.scale[:: scheme.group or 1].contiguous() if scheme.floats else scale
        return {"weight": rounded.q, "weight_scale": scales}
    q, zero = _unsigned(rounded)
    parts = {
        "weight_packed": pack(q, scheme.bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor(rounded.q.shape, dtype=torch.int64),
    }
    if not scheme.symmetric:
        parts["weight_zero_point"] = pack(zero.t(), scheme.bits).t().contiguous()
    return parts


def _compressed_tensors_config(schemes: Schemes, plain: Sequence[str]) -> dict[str, Any]:
    """Return the config whose most frequent scheme is that of all linears; modules of another one are named."""
    groups: dict[str, Any] = {}
    counts = Counter(scheme for scheme in schemes.values() if scheme is not None)
    for index, (scheme, _) in enumerate(counts.most_common()):
        names = ["Linear"] if index == 0 else [name for name, other in schemes.items() if other == scheme]
        weights: dict[str, Any] = {
            "num_bits": scheme.bits, "type": "float" if scheme.floats else "int", "symmetric": scheme.symmetric,
            "strategy": "channel" if scheme.group is None else "group", "group_size": scheme.group,
            "dynamic": False,
        }  # fmt: skip
        if scheme.floats and scheme.group is not None:
            size = scheme.group
            weights |= {"strategy": "block", "group_size": None, "block_structure": [size, size]}
        activations = {
            "num_bits": 8, "type": weights["type"], "symmetric": True, "strategy": "token", "dynamic": True,
        }  # fmt: skip
        if weights["strategy"] == "block":
            activations |= {"strategy": "group", "group_size": scheme.group}
        groups[f"group_{index}"] = {
            "targets": names, "weights": weights, "input_activations": activations if scheme.activations else None,
            "output_activations": None, "format": _form(scheme),
        }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": groups["group_0"]["format"],
        "quantization_status": "compressed", "config_groups": groups, "ignore": list(plain),
    }  # fmt: skip


def _form(scheme: Scheme) -> str:
    if scheme.floats:
        return "float-quantized"
    return "int-quantized" if scheme.activations else "pack-quantized"


def _gptq(rounded: Rounded) -> dict[str, Tensor]:
    q, zero = _unsigned(rounded)
    bits, in_features = rounded.scheme.bits, q.shape[1]
    group = in_features // zero.shape[1]
    return {
        "qweight": pack(q, bits).t().contiguous(), "qzeros": pack(zero.t() - 1, bits),
        "scales": rounded.grid.scale.half().t().contiguous(),
        "g_idx": (torch.arange(in_features) // group).to(torch.int32),
    }  # fmt: skip


def _gptq_config(schemes: Schemes, plain: Sequence[str]) -> dict[str, Any]:
    scheme = _only(schemes)
    return {
        "quant_method": "gptq", "bits": scheme.bits, "group_size": scheme.group or -1, "sym": scheme.symmetric,
        "desc_act": False, "static_groups": True, "checkpoint_format": "gptq", "lm_head": False,
    }  # fmt: skip


def _awq(rounded: Rounded) -> dict[str, Tensor]:
    q, zero = _unsigned(rounded)
    return {
        "qweight": pack(q.t(), rounded.scheme.bits, AWQ_ORDER),
        "qzeros": pack(zero.t(), rounded.scheme.bits, AWQ_ORDER),
        "scales": rounded.grid.scale.half().t().contiguous(),
    }  # fmt: skip


def _awq_config(schemes: Schemes, plain: Sequence[str]) -> dict[str, Any]:
    scheme = _only(schemes)
    return {
        "quant_method": "awq", "bits": scheme.bits, "group_size": scheme.group or -1, "zero_point": True,
        "version": "gemm", "modules_to_not_convert": list(plain),
    }  # fmt: skip


def _gguf(rounded: Rounded) -> dict[str, Tensor]:
    assert rounded.scheme.block is not None
    return {rounded.scheme.block: block_bytes(rounded)}


def _no_config(schemes: Schemes, plain: Sequence[str]) -> dict[str, Any]:
    return {}


def _only(schemes: Schemes) -> Scheme:
    (scheme,) = {scheme for scheme in schemes.values() if scheme is not None}
    return scheme


LAYOUTS: Mapping[str, Layout] = {
    "compressed-tensors": Layout(_compressed_tensors, _compressed_tensors_config, mixes=True),
    "gptq": Layout(_gptq, _gptq_config, mixes=False),
    "awq": Layout(_awq, _awq_config, mixes=False),
    "bnb": Layout(nf4_parts, nf4_config, mixes=False),
    "gguf": Layout(_gguf, _no_config, mixes=True),
}
