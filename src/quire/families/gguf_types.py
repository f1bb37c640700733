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
    6: TensorType("q5_0", 32, 22, WeightFormat("int8", 32)),
    7: TensorType("q5_1", 32, 24, WeightFormat("int8", 32, has_offset=True)),
    8: TensorType("q8_0", 32, 34, WeightFormat("int8", 32)),
    12: TensorType("q4_k", 256, 144, WeightFormat("int4", 32, has_offset=True)),
    13: TensorType("q5_k", 256, 176, WeightFormat("int8", 32, has_offset=True)),
    14: TensorType("q6_k", 256, 210, WeightFormat("int8", 16)),
    30: TensorType("bfloat16", 1, 2),
}
BLOCK_TYPES: Mapping[str, TensorType] = {
    each.name: each for each in TENSOR_TYPES.values() if each.held.quantized
}
# Names of the other types, for error messages.
OTHER_TYPES: Mapping[int, str] = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
