"""Random blocks of every ggml type, for those that the gguf package decodes and does not encode."""

from __future__ import annotations

import gguf
import numpy as np

# Where a block has its float16 scales.
_PLACES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,),
           "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}  # fmt: skip


def _set_scale(blocks: np.ndarray, kind: gguf.GGMLQuantizationType, scale: float) -> None:
    if kind.name == "MXFP4":
        blocks[:, 0] = min(254, max(1, round(128 + np.log2(scale))))
        return
    value = np.array([scale], np.float16).view(np.uint8)
    if kind.name == "IQ1_M":  # a nibble in the upper half of every second byte
        nibbles = (value[0] & 15, value[0] >> 4, value[1] & 15, value[1] >> 4)
        for at, nibble in zip((49, 51, 53, 55), nibbles, strict=True):
            blocks[:, at] = blocks[:, at] & 15 | nibble << 4
        return
    for at in _PLACES.get(kind.name, (0,)):
        blocks[:, at : at + 2] = value


def random_blocks(
    kind: gguf.GGMLQuantizationType, shape: tuple[int, ...], std: float, rng: np.random.Generator
) -> np.ndarray:
    """Return random blocks ``[..., bytes per row]`` of weights ``shape`` whose standard deviation is near ``std``."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    count = int(np.prod(shape)) // block
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    _set_scale(blocks, kind, 1.0)
    spread = float(np.square(gguf.quants.dequantize(blocks, kind)).mean()) ** 0.5
    _set_scale(blocks, kind, std / spread)
    return blocks.reshape(*shape[:-1], shape[-1] // block * size)
