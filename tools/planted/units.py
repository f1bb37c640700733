"""Planted faults in weights that are held at the size of their file, and in what is rounded again."""

from __future__ import annotations

from mutant import Mutant

LINEAR = "tests/kernels/test_quantized_linear.py::"
SAME_BITS = (f"{LINEAR}test_the_reference_is_near_fp64_and_every_backend_has_its_bits",)
BLOCKS = "tests/quant/test_gguf_blocks.py::"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "scales-of-the-other-half",
        "the two groups of 16 of a unit take each other's scales",
        "csrc/cpu/unit_tile.h",
        "const uint8_t* at = scales + g * kLayout.number_bytes();",
        "const uint8_t* at = scales + (kParts - 1 - g) * kLayout.number_bytes();",
        SAME_BITS,
    ),
    Mutant(
        "outer-scale-of-the-first-columns",
        "nested scales of all columns are multiplied with the outer scales of the panel's first vector",
        "csrc/cpu/unit_tile.h",
        "const Vec outer = load_half(head + lane * 2);",
        "const Vec outer = load_half(head);",
        SAME_BITS,
    ),
    Mutant(
        "short-last-unit-dropped",
        "inputs after the last whole 32 are left out",
        "csrc/cpu/unit_layout.h",
        "int64_t num_units(int64_t k) const { return (k + kUnit - 1) / kUnit; }",
        "int64_t num_units(int64_t k) const { return k < kUnit ? 1 : k / kUnit; }",
        SAME_BITS,
    ),
    Mutant(
        "high-bits-of-the-next-quad",
        "codes of five bits take the highest bit of the quad after theirs",
        "csrc/cpu/unit_tile.h",
        "bits_at<i - 4, 16>",
        "bits_at<(i + 1) % 8 - 4, 16>",
        SAME_BITS,
    ),
    Mutant(
        "scales-unpacked-over-those-in-use",
        "on tiles, a panel's scales overwrite those of the panel before, whose last sums still need them",
        "csrc/cpu/quantized_groups_amx.h",
        "scales_ += panel_scales_, panel_scales_ = -panel_scales_;",
        "panel_scales_ = -panel_scales_;",
        ("tests/kernels/test_amx.py::test_quantized_weights_give_the_bits_of_avx512",),
    ),
    Mutant(
        "nested-scales-rounded",
        "scales of two parts are rounded to fp16",
        "src/quire/kernels/linear/packed.py",
        "[:, : inner.shape[1]] * inner.float()",
        "[:, : inner.shape[1]].mul(inner.float()).half().float()",
        (f"{BLOCKS}test_a_block_decodes_as_llama_cpp_decodes_it",),
    ),
    Mutant(
        "minima-added",
        "the minima of Q4_K and Q5_K are added, not taken away",
        "src/quire/quant/ggml_blocks.py",
        "mins, -stored_half(blocks, 2))",
        "mins, stored_half(blocks, 2))",
        (f"{BLOCKS}test_a_block_decodes_as_llama_cpp_decodes_it",),
    ),
    Mutant(
        "neighbours-swapped-in-mxfp4",
        "of two numbers of a byte of gpt-oss, the upper half comes first",
        "src/quire/quant/ggml_codebooks.py",
        "torch.stack((blocks & 15, blocks >> 4), dim=-1)",
        "torch.stack((blocks >> 4, blocks & 15), dim=-1)",
        ("tests/models/test_block_formats.py::test_mxfp4",),
    ),
    Mutant(
        "act-order-ignored",
        "groups of a GPTQ matrix with act order count as consecutive inputs",
        "src/quire/models/stored_weights.py",
        'group_of = tensors["index"].long()',
        'group_of = tensors["index"].long().sort().values',
        ("tests/quant/test_checkpoints.py::test_act_order_is_expanded_and_rounded_again",),
    ),
)
