"""`Quantization`: how each quantized linear of a checkpoint is stored, and what its readers share.

Torch-free.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from quire.errors import UnsupportedModelError
from quire.families.shape import Fields

# fp8_inverse has weight_scale_inv. bnb4 and bnb8 are of bitsandbytes, nvfp4 of compressed-tensors, modelopt its nvfp4.
Encoding = Literal[
    "packed", "int8", "awq", "awq_gemv", "gptq", "fp8", "fp8_inverse", "bnb4", "bnb8", "hqq", "nvfp4", "modelopt",
]  # fmt: skip
RARE = ("bnb4", "bnb8", "hqq", "nvfp4", "modelopt")  # encodings whose readers are loaded for such a file
BLOCK = 128  # inputs and outputs of an fp8 block with one scale


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one linear is stored. ``group`` None: one scale per output feature or, for fp8, per matrix.

    ``strided``: of HQQ, whose groups may be inputs that lie apart.
    """

    encoding: Encoding
    bits: int
    group: int | None
    symmetric: bool
    zero_minus_one: bool = False  # GPTQ's first format stores zero points minus 1
    strided: bool = False


@dataclass(frozen=True, slots=True)
class Quantization:
    """The schemes of a checkpoint by target; the first that matches a module applies."""

    targets: tuple[tuple[str, Scheme], ...]
    ignore: tuple[str, ...] = ()

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme of a module ("model.layers.0.mlp.up_proj"), None where it is plain."""
        if any(_matches(pattern, module) for pattern in self.ignore):
            return None
        return next((scheme for pattern, scheme in self.targets if _matches(pattern, module)), None)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return pattern in ("Linear", module)


def refuse_unknown(f: Fields, known: set[str]) -> None:
    """Refuse a key that is not ``known`` and that says something."""
    for key, value in f.values.items():
        if key not in known and value not in (None, {}, [], False):
            raise UnsupportedModelError(
                f"{f.where}: {key} = {value!r} is not known to Quire and might change what the weights mean."
            )


def read_bits(f: Fields, key: str, allowed: tuple[int, ...]) -> int:
    """Return the bits of a weight. Raises `UnsupportedModelError` unless they are ``allowed``."""
    bits = f.integer(key)
    f.refuse(key, unless=allowed, why="no kernel has it")
    return bits


def read_group(f: Fields, key: str) -> int | None:
    """Return the inputs that share a scale, None for a row. Raises `ModelLoadError` for 0."""
    size = f.integer(key, -1, minimum=-1)
    if size == 0:
        raise f.wrong(key, "-1 (the whole row) or an integer ≥ 1")
    return None if size == -1 else size
