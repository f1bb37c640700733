"""The rotation of inputs before they are rounded: against Sylvester's matrix, and the same bits at every level."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.kernels import cases
from tests.kernels.checks import (
    DTYPES,
    SEED,
    assert_rows_independent,
    assert_same_bits,
    assert_same_rows,
    each,
    generator,
    threads,
)
from tests.kernels.test_quantized_linear import BACKENDS, case_id, make, rows_of
from tests.quant.test_rtn import with_odd_groups

from quire.kernels.linear import linear, quantize_rows, read_rows
from quire.kernels.registry import Backend, backends
from quire.kernels.rotation import rotate_rows, rotate_weights
from quire.quant.rtn import quantize
from quire.weight_format import ROTATIONS, RowFormat, WeightFormat

NATIVE = [backend for backend in BACKENDS if backend != "reference"]
# Of every kind that is rotated, and with groups.
FORMATS = [
    *(WeightFormat("int8", rotation=block) for block in ROTATIONS),
    *(WeightFormat("int4", 16, rotation=block) for block in ROTATIONS),
    WeightFormat("int4", 32, rotation=64),
]
# Blocks of one number, of several, more than a pass of rows, and sizes off the panels.
SIZES = [
    cases.LinearCase(0, 64, 8),
    cases.LinearCase(1, 64, 33, bias=True),
    cases.LinearCase(7, 192, 70),
    cases.LinearCase(40, 1088, 96, bias=True),
    cases.LinearCase(530, 576, 40),
]


def sylvester(block: int) -> torch.Tensor:
    """The matrix in fp64, made by doubling."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < block:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / block**0.5


@pytest.mark.parametrize("block", ROTATIONS)
def test_a_rotation_is_a_product_with_the_matrix(block: int) -> None:
    x, matrix = torch.randn(5, 192, generator=generator()), sylvester(block)
    expected = (x.double().view(5, -1, block) @ matrix).view(5, -1)
    both = 2.0 ** (torch.tensor(block).log2().item() / 2)
    assert torch.allclose(matrix @ matrix.T, torch.eye(block, dtype=torch.float64))
    for rotate in (rotate_rows, rotate_weights):
        made = rotate(x, block).double()
        size = float((made * expected).sum() / expected.square().sum())  # a power of two near 1
        torch.testing.assert_close(made, expected * size, rtol=1e-5, atol=1e-5)
        assert abs(torch.tensor(size).log2().item()) < 0.51, (block, both)


@pytest.mark.parametrize("block", ROTATIONS)
def test_products_stay_and_weights_come_back(block: int) -> None:
    x, w = torch.randn(2, 7, 192, generator=generator())
    product = rotate_rows(x, block).double() @ rotate_weights(w, block).double().T
    torch.testing.assert_close(product, x.double() @ w.double().T, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(rotate_rows(rotate_weights(w, block), block), w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block", ROTATIONS)
def test_an_outlier_costs_its_neighbours_less(block: int) -> None:
    """What the rotation is for: the error of int8 rows with one outlier, in the space of the inputs."""
    x = torch.randn(64, 256, generator=generator())
    x[:, 37] *= 100

    def error_of(rotation: int | None) -> float:
        rows = quantize_rows(x, RowFormat(rotation=rotation))
        held = rows.q[:, :256].float() * rows.scale
        return float((held - rotate_rows(x, rotation)).square().sum())

    assert error_of(block) < 4 / block * error_of(None), SEED


@pytest.mark.parametrize("group", [None, 16, 32])
@pytest.mark.parametrize("block", ROTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
@pytest.mark.parametrize("size", [64, 192, 576, 1088])
def test_rows_are_rotated_alike(size: int, dtype: torch.dtype, block: int, group: int | None) -> None:
    x = rows_of(37, size, dtype)
    x[3] = 0
    x[4] *= 1e-35
    x[5, 0], x[6, size // 2], x[7, -1] = torch.nan, torch.inf, -torch.inf
    x[8] = torch.arange(size) % 255 - 127  # sums that are integers and halves
    x[9, 5], x[10] = 1000, x[10] * 2.0**-98  # an outlier; about the smallest that is kept
    x = torch.cat([x, x], 1)[:, :size]  # rows apart
    expected = quantize_rows(x, RowFormat(group, block))
    assert expected.scale[5:8].isnan().all()
    broken = expected.scale.isnan()
    expected.scale[broken] = -1.0
    for backend, count in itertools.product(NATIVE, (1, 2)):
        with threads(count):
            rows = quantize_rows(x, RowFormat(group, block), backend=backend)
        assert torch.equal(rows.scale.isnan(), broken), backend
        rows.scale[broken] = -1.0
        assert_same_rows(rows, expected, backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("case", SIZES, ids=case_id)
def test_linears_have_the_bits_of_the_reference(
    case: cases.LinearCase, format: WeightFormat, dtype: torch.dtype
) -> None:
    x = rows_of(case.num_tokens, case.in_features, dtype)
    expected = linear(x, make(case, format, dtype, "reference")[0])
    for backend in NATIVE:
        y = linear(x, make(case, format, dtype, backend)[0])
        assert_same_bits(y, expected, f"{case} {format} {backend}")


@each("backend", BACKENDS)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_row_does_not_depend_on_the_batch(format: WeightFormat, backend: Backend) -> None:
    packed, _, _ = make(cases.LinearCase(1, 320, 70, bias=True), format, torch.bfloat16, backend)
    pool = rows_of(40, 320, torch.bfloat16, seed=4)
    assert_rows_independent(lambda ids: linear(pool[ids], packed), 40, str(format))


@each("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_rows_of_a_matrix_come_back_as_they_were(
    format: WeightFormat, dtype: torch.dtype, backend: Backend
) -> None:
    """The look-up of a tied embedding: what the checkpoint has, within the step of its rounding."""
    case, ids = cases.LinearCase(1, 192, 70), torch.tensor([69, 0, 5, 5])
    expected = read_rows(make(case, format, dtype, "reference")[0], ids)
    assert_same_bits(read_rows(make(case, format, dtype, backend)[0], ids), expected, f"rows {format}")


@each("backend", backends("round_to_nearest"))
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=case_id)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_weights_are_rotated_once_and_rounded_alike(
    format: WeightFormat, dtype: torch.dtype, backend: Backend
) -> None:
    plain = WeightFormat(format.kind, format.group)
    assert format.rotation is not None
    for rows, columns in ((7, 64), (33, 1088)):
        weight = with_odd_groups(torch.randn(rows, columns, generator=generator())).to(dtype)
        expected = quantize(rotate_weights(weight, format.rotation), plain)
        for count in (1, 2):
            with threads(count):
                found = quantize(weight, format, backend=backend)
            assert found.format == format
            assert torch.equal(found.q, expected.q), f"{rows} x {columns}, seed {SEED}"
            assert torch.equal(found.scale.nan_to_num(-1.0), expected.scale.nan_to_num(-1.0)), SEED
            if expected.multiplier is not None:
                assert found.multiplier is not None
                assert torch.equal(found.multiplier, expected.multiplier), SEED
