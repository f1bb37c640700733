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
    10: TensorType("q2_k", 256, 84, WeightFormat("int8", 16, has_offset=True)),
    11: TensorType("q3_k", 256, 110, WeightFormat("int8", 16)),
    12: TensorType("q4_k", 256, 144, WeightFormat("int4", 32, has_offset=True)),
    13: TensorType("q5_k", 256, 176, WeightFormat("int8", 32, has_offset=True)),
    14: TensorType("q6_k", 256, 210, WeightFormat("int8", 16)),
    16: TensorType("iq2_xxs", 256, 66, WeightFormat("int8", 32)),
    17: TensorType("iq2_xs", 256, 74, WeightFormat("int8", 16)),
    18: TensorType("iq3_xxs", 256, 98, WeightFormat("int8", 32)),
    19: TensorType("iq1_s", 256, 50, WeightFormat("int4", 32, has_offset=True)),
    20: TensorType("iq4_nl", 32, 18, WeightFormat("int8", 32)),
    21: TensorType("iq3_s", 256, 110, WeightFormat("int4", 32, has_offset=True)),
    22: TensorType("iq2_s", 256, 82, WeightFormat("int8", 16)),
    23: TensorType("iq4_xs", 256, 136, WeightFormat("int8", 32)),
    29: TensorType("iq1_m", 256, 56, WeightFormat("int8", 16)),
    30: TensorType("bfloat16", 1, 2),
    34: TensorType("tq1_0", 256, 54, WeightFormat("int4", 64)),
    35: TensorType("tq2_0", 256, 66, WeightFormat("int4", 64)),
    39: TensorType("mxfp4", 32, 17, WeightFormat("int8", 32)),
}
BLOCK_TYPES: Mapping[str, TensorType] = {
    each.name: each for each in TENSOR_TYPES.values() if each.held.quantized
}
# Names of the other types, for error messages.
OTHER_TYPES: Mapping[int, str] = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 31: "Q4_0_4_4", 32: "Q4_0_4_8",
    33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
# Types of ik_llama.cpp, a fork with numbers of its own; those from 200 on are its types in another order of rows.
IK_TYPES: Mapping[int, str] = {
    97: "Q8_0_X4", 98: "Q8_1_X4", 99: "Q8_2_X4", 133: "Q6_0", 134: "IQ1_BN", 135: "IQ2_BN", 136: "Q8_K64", 137: "IQ2_K",
    138: "IQ3_K", 139: "IQ4_K", 140: "IQ5_K", 141: "IQ6_K", 144: "IQ4_KS", 145: "IQ2_KS", 146: "IQ4_KSS", 152: "IQ5_KS",
    153: "IQ2_KT", 154: "IQ3_KT", 155: "IQ4_KT", 156: "IQ3_KS", 157: "IQ2_KL", 158: "IQ1_KT",
}  # fmt: skip
IK_FIRST, IK_REPACKED, IK_END = 96, 200, 400


def refusal(number: int) -> str:
    """Return what a type that is not read is, and what to take instead."""
    if IK_FIRST <= number < IK_END:
        name = IK_TYPES.get(number, f"number {number}")
        order = " in its own order of rows" if number >= IK_REPACKED else ""
        return f"{name}, a type of ik_llama.cpp{order}, which llama.cpp's files do not have"
    if number in OTHER_TYPES:
        return f"{OTHER_TYPES[number]}, which is not supported"
    return f"number {number}, which is damaged or of a newer ggml than this version of Quire reads"
