"""Linears with int8 and int4 weights: against fp64, against the reference's bits, and row by row."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.kernels import cases
from tests.kernels.checks import (
    DTYPES,
    SEED,
    assert_close,
    assert_rows_independent,
    assert_same_bits,
    generator,
    threads,
)

from quire.kernels import registry
from quire.kernels.linear import (
    PackedLinear,
    QuantizedWeight,
    linear,
    native,
    pack_empty,
    quantize_rows,
    read_rows,
    write_bias,
    write_rows,
)
from quire.kernels.linear.packed import NestedScales, range_of, storable_scales
from quire.kernels.linear.reference import dequantize, scale_group
from quire.kernels.quantized_rows import num_groups
from quire.kernels.registry import Backend
from quire.quant.ggml_codebooks import FP4_LEVELS, IQ4_LEVELS
from quire.weight_format import NESTED, RowFormat, WeightFormat

LEVELS = {"iq4": IQ4_LEVELS, "fp4": FP4_LEVELS}
BACKENDS = registry.backends("quantized_linear")
# What most machines take. The other levels have the reference's bits too, at every shape that is compared.
FREQUENT = (
    "reference",
    "avx2",
    next((level for level in registry.NATIVE_LEVELS if level in BACKENDS), "reference"),
)
SMALL = [case for case in cases.QUANTIZED if not case.bench]


def case_id(value: object) -> str:
    if isinstance(value, WeightFormat):
        scales = "" if value.scales == "half" else f"-{value.scales}"
        return f"{value.kind}-{value.group}{'-offset' if value.has_offset else ''}{scales}"
    if isinstance(value, cases.LinearCase):
        return f"{value.num_tokens}x{value.in_features}x{value.out_features}"
    return str(value).removeprefix("torch.")


def random_weight(out_features: int, in_features: int, format: WeightFormat) -> QuantizedWeight:
    rng = generator()
    limits = range_of(format)
    assert limits is not None
    low, high = limits
    q = torch.randint(low, high + 1, (out_features, in_features), generator=rng).to(torch.int8)
    if format.kind in LEVELS:
        q = torch.tensor(LEVELS[format.kind], dtype=torch.int8)[q.int() % 16]
    groups = num_groups(in_features, format.group)
    if format.scales == "nested":
        return QuantizedWeight.of_nested(format, q, random_nested(out_features, in_features, format, rng))
    if format.scales == "power":
        exponents = torch.randint(-20, -8, (out_features, groups), generator=rng)
        return QuantizedWeight(format, q, torch.exp2(exponents.float()))
    if format.two_level:
        multiplier = torch.randint(0, 16, (out_features, groups), generator=rng).to(torch.uint8)
        scale = (torch.rand(out_features, 1, generator=rng) + 0.1) * 0.001
        return QuantizedWeight(format, q, scale, multiplier=multiplier)
    scale = (torch.rand(out_features, groups, generator=rng) + 0.1) * 0.01
    offset = torch.randn(out_features, groups, generator=rng) * 0.02 if format.has_offset else None
    return QuantizedWeight(format, q, scale, offset)


def random_nested(
    out_features: int, in_features: int, format: WeightFormat, rng: torch.Generator
) -> NestedScales:
    inner, outer = num_groups(in_features, format.group), num_groups(in_features, NESTED)
    low, high = {"int2": (0, 15), "int4": (0, 63), "int5": (0, 63)}.get(format.kind, (-32, 31))
    if format.kind == "int6":
        low, high = -128, 127
    scale = torch.randint(low, high + 1, (out_features, inner), generator=rng).to(torch.int8)
    outer_scale = (torch.rand(out_features, outer, generator=rng) * 1e-3).half()
    if not format.has_offset:
        return NestedScales(scale, outer_scale)
    offset = torch.randint(0, high + 1, (out_features, inner), generator=rng).to(torch.uint8)
    return NestedScales(
        scale, outer_scale, offset, (torch.randn(out_features, outer, generator=rng) * 1e-3).half()
    )


def part(weight: QuantizedWeight, rows: slice) -> QuantizedWeight:
    offset = None if weight.offset is None else weight.offset[rows]
    multiplier = None if weight.multiplier is None else weight.multiplier[rows]
    nested = None if weight.nested is None else weight.nested.each(lambda part: part[rows])
    return QuantizedWeight(weight.format, weight.q[rows], weight.scale[rows], offset, multiplier, nested)


def make(
    case: cases.LinearCase, format: WeightFormat, dtype: torch.dtype, backend: Backend
) -> tuple[PackedLinear, QuantizedWeight, torch.Tensor]:
    weight = random_weight(case.out_features, case.in_features, format)
    bias = torch.randn(case.out_features, generator=generator(1)).to(dtype)
    packed = pack_empty(
        case.out_features, case.in_features, dtype, bias=case.bias, backend=backend, format=format
    )
    cut = case.out_features // 3  # in two parts, as fused matrices arrive, the later first
    write_rows(packed, cut, part(weight, slice(cut, None)))
    write_rows(packed, 0, part(weight, slice(cut)))
    if case.bias:
        write_bias(packed, 0, bias)
    else:
        bias = torch.zeros_like(bias)
    return packed, weight, bias


def rows_of(num_tokens: int, size: int, dtype: torch.dtype, seed: int = 3) -> torch.Tensor:
    return torch.randn(num_tokens, size, generator=generator(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
@pytest.mark.parametrize("format", cases.FORMATS, ids=case_id)
def test_the_reference_is_near_fp64_and_every_backend_has_its_bits(
    format: WeightFormat, dtype: torch.dtype
) -> None:
    for case in SMALL:
        packed, weight, bias = make(case, format, dtype, "reference")
        x = rows_of(case.num_tokens, case.in_features, dtype)
        expected = linear(x, packed)
        assert expected.dtype == dtype
        assert_close("quantized_linear", expected, product(x, weight) + bias.double())
        for backend in BACKENDS:
            y = linear(x, make(case, format, dtype, backend)[0])
            assert_same_bits(y, expected, f"{case} {format} {backend}")


def product(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """Return the product of rounded rows and a matrix, in fp64."""
    format, in_features = weight.format, x.shape[1]
    rows = quantize_rows(x, format.rows)
    scale = rows.scale.double().repeat_interleave(format.rows.block or in_features, 1)
    repeats = scale_group(format) or in_features
    w = weight.integers.double() * weight.scale.double().repeat_interleave(repeats, 1)[:, :in_features]
    if weight.offset is not None:
        w = w + weight.offset.double().repeat_interleave(repeats, 1)[:, :in_features]
    return rows.q.double()[:, :in_features] * scale[:, :in_features] @ w.T


@pytest.mark.parametrize(
    "backend", [pytest.param(each, marks=[pytest.mark.slow] * (each not in FREQUENT)) for each in BACKENDS]
)
@pytest.mark.parametrize("format", cases.FORMATS, ids=case_id)
@pytest.mark.parametrize("size", [(131, 33), (1100, 70)])
def test_a_row_does_not_depend_on_the_batch(
    size: tuple[int, int], format: WeightFormat, backend: Backend
) -> None:
    packed, _, _ = make(cases.LinearCase(1, *size, bias=True), format, torch.bfloat16, backend)
    pool = rows_of(40, size[0], torch.bfloat16, seed=4)
    assert_rows_independent(lambda ids: linear(pool[ids], packed), 40, f"{size} {format}")


@pytest.mark.parametrize("format", cases.FORMATS, ids=case_id)
def test_rows_beyond_one_pass(format: WeightFormat) -> None:
    """Kernels go over the weights once per 512 rows (at level amx, 256 for bf16)."""
    pool, ids = rows_of(37, 33, torch.bfloat16, seed=4), torch.arange(1100) % 37
    for backend in BACKENDS:
        packed, _, _ = make(cases.LinearCase(1, 33, 40), format, torch.bfloat16, backend)
        expected = linear(pool, packed)[ids]
        assert_same_bits(linear(pool[ids], packed), expected, f"1,100 rows {format} {backend}")


@pytest.mark.parametrize("format", sorted({each.rows for each in cases.FORMATS}, key=str), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
@pytest.mark.parametrize("size", [1, 13, 64, 131, 512, 1100])
def test_rows_are_quantized_alike(size: int, dtype: torch.dtype, format: RowFormat) -> None:
    x = rows_of(37, size, dtype)
    x[3] = 0
    x[4] *= 1e-35
    x[5, 0], x[6, size // 2], x[7, -1] = torch.nan, torch.inf, -torch.inf
    x[8] = torch.arange(size) % 255 - 127  # integers and halves
    x[9] = (torch.arange(size) % 509 - 254) / 2
    x = torch.cat([x, x], 1)[:, :size]  # rows apart
    expected = quantize_rows(x, format)
    for backend, count in itertools.product(BACKENDS, (1, 2)):
        with threads(count):
            rows = quantize_rows(x, format, backend=backend)
        assert torch.equal(rows.q, expected.q), (backend, SEED)
        assert torch.equal(rows.sums, expected.sums), (backend, SEED)
        assert torch.equal(rows.scale.view(torch.int32) == 0, expected.scale.view(torch.int32) == 0), backend
        torch.testing.assert_close(rows.scale, expected.scale, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("format", cases.FORMATS, ids=case_id)
def test_broken_rows_stay_visible(format: WeightFormat) -> None:
    x = rows_of(5, 64, torch.bfloat16)
    broken = x.clone()
    broken[1, 7], broken[3, 0] = torch.nan, -torch.inf
    for backend in BACKENDS:
        packed, _, _ = make(cases.LinearCase(1, 64, 33, bias=True), format, torch.bfloat16, backend)
        y = linear(broken, packed)
        assert torch.isnan(y[[1, 3]]).all(), backend
        assert_same_bits(y[[0, 2, 4]], linear(x, packed)[[0, 2, 4]], f"rows next to broken ones, {backend}")


@pytest.mark.parametrize("format", cases.FORMATS, ids=case_id)
def test_rows_come_back(format: WeightFormat) -> None:
    case, ids = cases.LinearCase(1, 131, 70), torch.tensor([69, 0, 5, 5])
    packed, weight, _ = make(case, format, torch.bfloat16, "reference")
    expected = read_rows(packed, torch.arange(70))
    plain = dequantize(weight.integers, weight.scale, weight.offset, scale_group(format))
    torch.testing.assert_close(expected.float(), plain, rtol=2**-8, atol=2**-11)
    for backend in BACKENDS:
        packed, _, _ = make(case, format, torch.bfloat16, backend)
        assert_same_bits(read_rows(packed, ids), expected[ids], f"read_rows {backend}")
        assert read_rows(packed, ids[:0]).shape == (0, 131)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [(64, 33), (131, 70), (2100, 40), (33000, 33)])
def test_two_levels_have_the_bits_of_int8(size: tuple[int, int], backend: Backend) -> None:
    """Whatever the rows: m · (q + m mod 2) as int8 weights with a scale a row, by kernels that know no multipliers."""
    in_features, out_features = size
    weight = random_weight(out_features, in_features, WeightFormat("int4", 16))
    expanded = QuantizedWeight(WeightFormat("int8"), weight.integers, weight.scale)
    packed = [
        pack_empty(out_features, in_features, torch.bfloat16, bias=True, backend=backend, format=each.format)
        for each in (weight, expanded)
    ]
    for matrix, each in zip(packed, (weight, expanded), strict=True):
        write_rows(matrix, 0, each)
        write_bias(matrix, 0, torch.randn(out_features, generator=generator(1)))
    x = rows_of(1 if backend == "reference" else 45, in_features, torch.bfloat16)
    x[0] = x[0].sign()  # ±127: the largest sums there are
    for count in {1, min(7, len(x)), min(17, len(x)), len(x)}:
        assert_same_bits(
            linear(x[:count], packed[0]), linear(x[:count], packed[1]), f"{count} rows of {size}"
        )


def test_group_scales_of_checkpoints_are_kept_exactly() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        scale = (torch.rand(9, 7, generator=generator()) * 1e-3 + 1e-6).to(dtype).float()
        mantissas, _, power = storable_scales(scale, None)
        assert_same_bits(mantissas.float() * power.unsqueeze(1), scale, str(dtype))
    mantissas, offsets, power = storable_scales(torch.zeros(2, 3), torch.zeros(2, 3))
    assert offsets is not None
    assert torch.isfinite(power).all()
    assert not mantissas.any()
    assert not offsets.any()


@pytest.mark.skipif("avx2" not in BACKENDS, reason="no AVX2 here")
@pytest.mark.parametrize("format", cases.FORMATS, ids=case_id)
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 40])
def test_avx2_without_vnni_has_the_same_bits(num_tokens: int, format: WeightFormat) -> None:
    """The level takes AVX-VNNI where the CPU has it; laptops without it take this."""
    case = cases.LinearCase(num_tokens, 1100, 70, bias=True)
    packed, _, _ = make(case, format, torch.bfloat16, "avx2")
    signs = rows_of(num_tokens, 1100, torch.bfloat16).sign()  # ±127: the largest sums there are
    rows = quantize_rows(signs, format.rows)
    actual = native.int_linear("avx2_madd", rows, packed, None)
    expected = linear(rows, make(case, format, torch.bfloat16, "reference")[0])
    assert_same_bits(actual, expected, f"{num_tokens} {format}")
