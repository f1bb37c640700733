"""Planted faults in the scales that rows of int8 have per block of inputs."""

from __future__ import annotations

from mutant import Mutant

SAME_BITS = (
    "tests/kernels/test_quantized_linear.py::test_the_reference_is_near_fp64_and_every_backend_has_its_bits",
)
ROWS = ("tests/kernels/test_quantized_linear.py::test_rows_are_quantized_alike",)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "scale-of-the-next-block",
        "a block of a row's inputs is multiplied by the scale of the block after it",
        "csrc/cpu/group_tile.h",
        "+ (p >> parts.block_shift)])",
        "+ std::min((p >> parts.block_shift) + 1, parts.blocks - 1)])",
        SAME_BITS,
    ),
    Mutant(
        "last-block-by-the-one-before",
        "a short last block of a row is rounded by the scale of the block before it",
        "csrc/cpu/quantize_row.h",
        "return inverse[i / kBlock];",
        "return inverse[i > kBlock && k - i < kBlock / 2 ? i / kBlock - 1 : i / kBlock];",
        ROWS,
    ),
    Mutant(
        "offsets-times-whole-numbers",
        "what a block's offsets are multiplied with is rounded to an integer",
        "csrc/cpu/group_tile.h",
        "return scale * static_cast<float>(sum);",
        "return std::nearbyint(scale * static_cast<float>(sum));",
        SAME_BITS,
    ),
    Mutant(
        "offsets-times-bf16",
        "what a block's offsets are multiplied with is cut to bf16",
        "csrc/cpu/group_tile.h",
        "return scale * static_cast<float>(sum);",
        "return std::bit_cast<float>(std::bit_cast<uint32_t>(scale * static_cast<float>(sum)) & 0xffff0000u);",
        SAME_BITS,
    ),
    Mutant(
        "tiles-by-the-first-block",
        "on tiles, two blocks that become floats together take the scale of the first",
        "csrc/cpu/quantized_groups_amx.h",
        "broadcast(d.scales[i].scale[r])",
        "broadcast(d.scales[0].scale[r])",
        ("tests/kernels/test_amx.py::test_quantized_weights_give_the_bits_of_avx512",),
    ),
    Mutant(
        "experts-share-a-row-of-scales",
        "an expert's rows take the scales of the first rows of the batch",
        "csrc/cpu/moe_experts.cpp",
        "at<float>(at_.all_scale) + token * blocks, blocks * 4",
        "at<float>(at_.all_scale) + i * blocks, blocks * 4",
        ("tests/kernels/test_moe.py::test_quantized_experts_are_linears_one_by_one",),
    ),
)
