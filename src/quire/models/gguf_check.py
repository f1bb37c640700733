"""`scales_not_finite`: blocks of GGUF files whose scale is NaN or infinite, for ``quire doctor --check``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from quire.families.gguf_types import BLOCK_TYPES
from quire.models.safetensors_file import NotFinite, StoredTensor
from quire.units import PIECE_BYTES

# Where a block has its float16 scales; the other types have one at 0.
_PLACES: Mapping[str, tuple[int, ...]] = {
    "q4_1": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2), "q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,),
    "tq1_0": (52,), "tq2_0": (64,),
}  # fmt: skip
_EXPONENT, _MANTISSA = 0x7C00, 0x3FF


def scales_not_finite(tensors: Mapping[str, StoredTensor]) -> Iterator[NotFinite]:
    """Yield each quantized tensor that has a scale that is not finite, with the index of its block's first weight."""
    for name, stored in tensors.items():
        if stored.dtype in BLOCK_TYPES:
            problem = _scan(name, stored)
            if problem is not None:
                yield problem


def _scan(name: str, stored: StoredTensor) -> NotFinite | None:
    form = BLOCK_TYPES[stored.dtype]
    raw = np.frombuffer(stored.buffer, np.uint8, stored.num_bytes, stored.offset).reshape(
        -1, form.block_bytes
    )
    num_nan, num_inf, first = 0, 0, -1
    at_once = PIECE_BYTES // form.block_bytes
    for start in range(0, len(raw), at_once):
        nan, inf = _kinds(raw[start : start + at_once], stored.dtype)
        bad = np.flatnonzero(nan | inf)
        if bad.size:
            first = start + int(bad[0]) if first < 0 else first
            num_nan += int(nan.sum())
            num_inf += int((inf & ~nan).sum())
    stored.unmap_pages()
    if first < 0:
        return None
    index = np.unravel_index(first * form.block, stored.shape)
    return NotFinite(name, stored.file, num_nan, num_inf, tuple(int(i) for i in index))


def _kinds(blocks: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return for each block whether one of its scales is NaN, and whether one is infinite."""
    if kind == "mxfp4":
        nan = (blocks[:, 0] == 255) & ((blocks[:, 1:] & 0x77) != 0).any(1)
        return nan, np.zeros_like(nan)
    if kind == "iq1_m":
        words = np.ascontiguousarray(blocks[:, 48:56]).view(np.uint16) >> 12
        scales = [(words << np.arange(0, 16, 4, dtype=np.uint16)).sum(1, dtype=np.uint16)]
    else:
        places = _PLACES.get(kind, (0,))
        scales = [np.ascontiguousarray(blocks[:, at : at + 2]).view(np.uint16)[:, 0] for at in places]
    full = [(scale & _EXPONENT) == _EXPONENT for scale in scales]
    nan = np.any([f & ((s & _MANTISSA) != 0) for f, s in zip(full, scales, strict=True)], axis=0)
    return nan, np.any(full, axis=0) & ~nan
