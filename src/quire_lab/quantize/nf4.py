"""NF4 with double quantization (Dettmers et al. 2023), in the tensors that bitsandbytes reads.

    w = table[q] · absmax          16 levels, quantiles of a normal distribution; absmax of 64 consecutive weights
    absmax = map[code] · largest + offset     8 bits; largest of 256 of them, offset their mean in the matrix

The map of codes is bitsandbytes' "dynamic" one: seven decades, each with twice as many numbers as the one below it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quire_lab.quantize.grid import Grid, Nested, Rounded, on_grid
from quire_lab.quantize.scheme import NF4, Scheme


def levels() -> Tensor:
    """Return the 16 rising numbers that 4 bits stand for."""
    numbers = (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    )  # fmt: skip
    return torch.tensor(numbers)


def dynamic_map() -> Tensor:
    """Return the 256 rising numbers between −1 and 1 that 8 bits stand for."""
    numbers = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2**decade + 1)
        means = ((edges[:-1] + edges[1:]) / 2.0 * 10.0 ** (decade - 6)).tolist()
        numbers += [*means, *(-mean for mean in means)]
    return torch.tensor(sorted(numbers))


def round_to_nf4(weight: Tensor) -> Rounded:
    """``weight [out, in]``, inputs a multiple of 64 → its indices in `levels`."""
    assert NF4.group is not None
    absmax = torch.unflatten(weight.float(), 1, (-1, NF4.group)).abs().amax(-1)
    numbers, offset = dynamic_map(), absmax.mean()
    rest = (absmax - offset).flatten()
    parts = torch.nn.functional.pad(rest, (0, -len(rest) % 256)).view(-1, 256)
    largest = parts.abs().amax(1)
    inverse = torch.where(largest > 0.0, largest.reciprocal(), 0.0).unsqueeze(1)
    codes = torch.bucketize(parts * inverse, (numbers[1:] + numbers[:-1]) / 2.0)
    stored = (numbers[codes] * largest.unsqueeze(1)).flatten()[: len(rest)] + offset
    nested = Nested(largest, codes.flatten()[: len(rest)], offset)
    grid = Grid(stored.view(absmax.shape), table=levels(), nested=nested)
    return Rounded(NF4, on_grid(weight, NF4, grid), grid)


def nf4_parts(rounded: Rounded) -> dict[str, Tensor]:
    """Return the tensors of a matrix: two weights in a byte, the first in its high bits."""
    nested = rounded.grid.nested
    assert nested is not None
    assert nested.d_min is not None
    q = rounded.q.view(-1, 2).to(torch.uint8)
    state = {
        "quant_type": "nf4", "blocksize": NF4.group, "dtype": "bfloat16", "shape": list(rounded.q.shape),
        "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": nested.d_min.item(),
    }  # fmt: skip
    return {
        "weight": (q[:, :1] << 4 | q[:, 1:]).contiguous(),
        "weight.absmax": nested.codes.to(torch.uint8),
        "weight.quant_map": levels(),
        "weight.nested_absmax": nested.d,
        "weight.nested_quant_map": dynamic_map(),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }


def nf4_config(schemes: Mapping[str, Scheme | None], plain: Sequence[str]) -> dict[str, Any]:
    """Return the ``quantization_config``."""
    return {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": list(plain),
    }  # fmt: skip
