"""Planted faults in how weights and rows are rounded: what is rotated, how often, and over which inputs."""

from __future__ import annotations

from mutant import Mutant

CODES = "tests/kernels/test_rope.py::test_tiles_of_codes_are_the_references"
KERNELS = "tests/kernels/test_rotation.py::"
PLAN = "tests/parallel/test_rotations.py::"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "gate-writes-unrotated-rows",
        "the gated activation writes int8 rows that are not rotated for weights that are",
        "src/quire/kernels/pointwise/__init__.py",
        "*(NO_ROWS if rows is None else row_words(rows))",
        "*(NO_ROWS if rows is None else (*row_words(rows)[:-2], 0, row_words(rows)[-1]))",
        ("tests/kernels/test_activation.py::test_to_int8_is_the_activation_quantized",),
    ),
    Mutant(
        "norm-writes-unrotated-rows",
        "the norm writes int8 rows that are not rotated for weights that are",
        "src/quire/kernels/norm/__init__.py",
        "*(NO_ROWS if rows is None else row_words(rows))",
        "*(NO_ROWS if rows is None else (*row_words(rows)[:-2], 0, row_words(rows)[-1]))",
        ("tests/kernels/test_norm.py::test_to_int8_is_the_norm_quantized",),
    ),
    Mutant(
        "experts-rows-not-rotated",
        "rows of rotated experts are rounded as they are",
        "src/quire/kernels/moe/__init__.py",
        "format.rotation or 0, row_stride(",
        "0, row_stride(",
        ("tests/kernels/test_moe.py::test_quantized_experts_are_linears_one_by_one",),
    ),
    Mutant(
        "weights-rotated-twice",
        "weights are rotated twice, which leaves them as they were",
        "src/quire/quant/rtn.py",
        "weight = rotate_weights(weight, held.rotation)",
        "weight = rotate_weights(rotate_weights(weight, held.rotation), held.rotation)",
        (f"{KERNELS}test_weights_are_rotated_once_and_rounded_alike",),
    ),
    Mutant(
        "int4-without-its-wide-matrices",
        "int4 rounds to 4 bits also what loses most there",
        "src/quire/weight_plan.py",
        'if quantize == "int4" else ()',
        'if quantize == "int4-g16" else ()',
        ("tests/test_weight_plan.py::test_int4_keeps_what_loses_most_in_8_bits",),
    ),
    Mutant(
        "output-not-rotated-back",
        "attention over codes leaves its output rotated",
        "csrc/cpu/attention_tiles_kernel.cpp",
        "    rotate_head(values, a.v_head_dim);\n",
        "",
        ("tests/kernels/test_attention.py::test_against_fp64",),
    ),
    Mutant(
        "steps-of-the-first-codes",
        "all codes of 4 bits of a key have the step and the low of the first 32",
        "csrc/cpu/kv_codes.h",
        "      groups += 2 * kTilePositions;\n",
        "",
        ("tests/kernels/test_attention.py::test_against_fp64",),
    ),
    Mutant(
        "low-half-lost",
        "storing an odd position's V in 4 bits clears the one before it",
        "csrc/cpu/kv_tile.h",
        "(byte & (0xf0 >> shift))",
        "(byte & 0xf0)",
        (CODES,),
    ),
    Mutant(
        "factors-on-one-side",
        "keys are balanced, and queries are not multiplied by what was taken from the keys",
        "src/quire/layers/key_balance.py",
        "torch.exp2(exponent)))",
        "torch.ones_like(exponent)))",
        ("tests/layers/test_key_balance.py::test_products_keep_their_bits",),
    ),
    Mutant(
        "factors-break-rotary-pairs",
        "the two elements of a rotary pair are balanced apart, which RoPE mixes",
        "src/quire/layers/key_balance.py",
        "    if spec.rope is None:\n        return squares\n",
        "    if spec.rope is not None:\n        return squares\n",
        ("tests/layers/test_key_balance.py::test_products_keep_their_bits",),
    ),
    Mutant(
        "padding-counts-as-zero-points",
        "scales of AWQ's gemv layout are taken with what pads them",
        "src/quire/models/stored_weights.py",
        "groups = 1 if scheme.group is None else in_features // scheme.group\n        zero",
        'groups = tensors["scale"].shape[1]\n        zero',
        ("tests/quant/test_checkpoints.py::test_weights_equal_the_plain_model",),
    ),
    Mutant(
        "rotation-differences-first",
        "a block's differences come before its sums",
        "src/quire/kernels/rotation.py",
        "(low + high, low - high)",
        "(low - high, low + high)",
        (f"{KERNELS}test_a_rotation_is_a_product_with_the_matrix",),
    ),
    Mutant(
        "last-step-of-a-rotation",
        "kernels leave out a step of a rotation",
        "csrc/cpu/rotate.h",
        "mix_vectors<1>(v), mix_vectors<2>(v), ",
        "mix_vectors<1>(v), ",
        (f"{KERNELS}test_rows_are_rotated_alike",),
    ),
    Mutant(
        "tied-rows-not-rotated-back",
        "embeddings of a tied matrix that is rotated are looked up as it is held",
        "src/quire/kernels/linear/native.py",
        "*format_words(packed.format), packed.format.rotation or 0,",
        "*format_words(packed.format), 0,",
        (f"{KERNELS}test_rows_of_a_matrix_come_back_as_they_were",),
    ),
    Mutant(
        "stored-integers-rotated",
        "integers that a file stores count as rotated",
        "src/quire/parallel/rotations.py",
        "format == stored.get(name) else",
        "not format else",
        (f"{PLAN}test_stored_integers_stay_as_they_are",),
    ),
    Mutant(
        "rotation-over-two-ranks",
        "a block of inputs that are rotated together lies on two ranks",
        "src/quire/parallel/rotations.py",
        "sizes[cut.name] |= {cut.columns.start, cut.columns.stop}",
        "sizes[cut.name] |= {len(cut.columns) * tp}",
        (f"{PLAN}test_a_block_lies_on_one_rank",),
    ),
)
