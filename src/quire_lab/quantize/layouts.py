"""How a rounded matrix lies in a file, and the ``quantization_config`` that says so.

    compressed-tensors   pack-quantized: words along the inputs ``[out, in / 8]``, zero points along the outputs
                         ``[out / 8, groups]``; the number in a word is q + 2^(bits − 1), the lowest bits first

Source: compressed-tensors' ``pack_to_int32``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quire_lab.quantize.rounding import Rounded
from quire_lab.quantize.scheme import Scheme

WORD = torch.iinfo(torch.int32).bits


def pack(numbers: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """``numbers [rows, n]``, from 0 on → int32 words ``[rows, n · bits / 32]``; the last word is filled with zeros.

    ``order``: for each number of a word the place that it takes, from the lowest bits on.
    """
    per_word = WORD // bits
    padded = torch.nn.functional.pad(numbers.to(torch.int64), (0, -numbers.shape[1] % per_word))
    places = torch.tensor(order or range(per_word), dtype=torch.int64) * bits
    words = torch.unflatten(padded, 1, (-1, per_word)) << places
    return words.sum(-1).to(torch.int32)  # the low 32 bits


def compressed_tensors(rounded: Rounded) -> dict[str, Tensor]:
    """Return suffix → tensor of a matrix in compressed-tensors' pack-quantized."""
    scheme = rounded.scheme
    parts = {
        "weight_packed": pack(rounded.q.to(torch.int16) - scheme.lowest, scheme.bits),
        "weight_scale": rounded.grid.scale.half(),
        "weight_shape": torch.tensor(rounded.q.shape, dtype=torch.int64),
    }
    if rounded.grid.zero is not None:
        zero = rounded.grid.zero - scheme.lowest
        parts["weight_zero_point"] = pack(zero.t(), scheme.bits).t().contiguous()
    return parts


def compressed_tensors_config(schemes: Mapping[str, Scheme | None], plain: Sequence[str]) -> dict[str, Any]:
    """Return ``quantization_config``. ``plain``: modules with a matrix that stays as it is.

    The most frequent scheme is that of all linears; modules of another one are named.
    """
    counts = Counter(scheme for scheme in schemes.values() if scheme is not None)
    groups = {}
    for index, (scheme, _) in enumerate(counts.most_common()):
        names = ["Linear"] if index == 0 else [name for name, each in schemes.items() if each == scheme]
        weights = {
            "num_bits": scheme.bits, "type": "int", "symmetric": scheme.symmetric,
            "strategy": "channel" if scheme.group is None else "group", "group_size": scheme.group,
            "dynamic": False,
        }  # fmt: skip
        groups[f"group_{index}"] = {
            "targets": names, "weights": weights, "input_activations": None, "output_activations": None,
        }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": groups, "ignore": list(plain),
    }  # fmt: skip
