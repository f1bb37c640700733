"""Which tensors of a checkpoint hold a NaN or an infinity: every stored float is read. Torch-free.

Such a weight turns every answer that it touches into an error ("the model's logits are not finite"), long after the
load. Packed types (uint8 blocks, GGUF's) are skipped: their payload has no such values, and their scales are checked
where they are separate tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.models.safetensors_file import StoredTensor

# Element type → its bits as an integer, and the bits of the exponent: all set means not finite.
_EXPONENTS: dict[str, tuple[np.dtype[Any], int]] = {
    "float32": (np.dtype(np.uint32), 0x7F80_0000),
    "float16": (np.dtype(np.uint16), 0x7C00),
    "bfloat16": (np.dtype(np.uint16), 0x7F80),
}
_AT_ONCE = 1 << 22  # elements


@dataclass(frozen=True, slots=True)
class NotFinite:
    """One tensor that should not be served."""

    name: str
    file: Path
    num_nan: int
    num_inf: int
    first: tuple[int, ...]  # index of the first such element


def not_finite(tensors: Mapping[str, StoredTensor]) -> Iterator[NotFinite]:
    """Yield each float tensor of ``tensors`` (name → where it lies) that holds a NaN or an infinity."""
    for name, stored in tensors.items():
        if stored.dtype in _EXPONENTS:
            found = _scan(name, stored)
            if found is not None:
                yield found


def _scan(name: str, stored: StoredTensor) -> NotFinite | None:
    kind, exponent = _EXPONENTS[stored.dtype]
    width = kind.itemsize
    magnitude = (1 << (8 * width - 1)) - 1  # all but the sign
    raw = np.frombuffer(stored.buffer, np.uint8, stored.num_bytes, stored.offset)  # may lie at an odd address
    num_nan, num_inf, first = 0, 0, -1
    step = _AT_ONCE * width
    for start in range(0, stored.num_bytes, step):
        bits = raw[start : start + step].view(kind)
        bad = np.flatnonzero((bits & kind.type(exponent)) == exponent)
        if bad.size:
            first = start // width + int(bad[0]) if first < 0 else first
            infinite = int(((bits[bad] & kind.type(magnitude)) == exponent).sum())
            num_inf += infinite
            num_nan += bad.size - infinite
    if first < 0:
        return None
    index = tuple(int(i) for i in np.unravel_index(first, stored.shape))
    return NotFinite(name, stored.file, num_nan, num_inf, index)
