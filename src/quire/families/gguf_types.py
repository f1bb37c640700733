"""The tensor types of GGUF files, as in llama.cpp's ``ggml-common.h``: blocks, and the formats that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.weight_format import PLAIN, WeightFormat


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor type: blocks of ``block`` numbers in ``block_bytes`` bytes. The format ``held`` is lossless."""

    name: str
    block: int
    block_bytes: int
    held: WeightFormat = PLAIN


# By the type's number in the file.
TENSOR_TYPES: Mapping[int, TensorType] = {
    0: TensorType("float32", 1, 4),
    1: TensorType("float16", 1, 2),
    2: TensorType("q4_0", 32, 18, WeightFormat("int4", 32)),
    3: TensorType("q4_1", 32, 20, WeightFormat("int4", 32, has_offset=True)),
    6: TensorType("q5_0", 32, 22, WeightFormat("int5", 32)),
    7: TensorType("q5_1", 32, 24, WeightFormat("int5", 32, has_offset=True)),
    8: TensorType("q8_0", 32, 34, WeightFormat("int8", 32)),
    10: TensorType("q2_k", 256, 84, WeightFormat("int2", 16, has_offset=True, scales="nested")),
    11: TensorType("q3_k", 256, 110, WeightFormat("int3", 16, scales="nested")),
    12: TensorType("q4_k", 256, 144, WeightFormat("int4", 32, has_offset=True, scales="nested")),
    13: TensorType("q5_k", 256, 176, WeightFormat("int5", 32, has_offset=True, scales="nested")),
    14: TensorType("q6_k", 256, 210, WeightFormat("int6", 16, scales="nested")),
    16: TensorType("iq2_xxs", 256, 66, WeightFormat("int8", 32)),
    17: TensorType("iq2_xs", 256, 74, WeightFormat("int8", 16)),
    18: TensorType("iq3_xxs", 256, 98, WeightFormat("int8", 32)),
    19: TensorType("iq1_s", 256, 50, WeightFormat("int4", 32, has_offset=True)),
    20: TensorType("iq4_nl", 32, 18, WeightFormat("iq4", 32)),
    21: TensorType("iq3_s", 256, 110, WeightFormat("int4", 32, has_offset=True)),
    22: TensorType("iq2_s", 256, 82, WeightFormat("int8", 16)),
    23: TensorType("iq4_xs", 256, 136, WeightFormat("iq4", 32, scales="nested")),
    29: TensorType("iq1_m", 256, 56, WeightFormat("int8", 16)),
    30: TensorType("bfloat16", 1, 2),
    34: TensorType("tq1_0", 256, 54, WeightFormat("int4", 64)),
    35: TensorType("tq2_0", 256, 66, WeightFormat("int4", 64)),
    39: TensorType("mxfp4", 32, 17, WeightFormat("fp4", 32, scales="power")),
}
BLOCK_TYPES: Mapping[str, TensorType] = {
    each.name: each for each in TENSOR_TYPES.values() if each.held.quantized
}
