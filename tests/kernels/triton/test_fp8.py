"""Linears with fp8 weights of a GPU against the reference; the invariant version's bits in any batch."""

from __future__ import annotations

import pytest
import torch
from tests.kernels import cases
from tests.kernels.checks import DTYPES, assert_close, assert_same_bits, generator
from tests.kernels.test_quantized_linear import case_id
from tests.kernels.triton.device import DEVICE, WARNINGS

from quire.kernels import block_sizes
from quire.kernels.linear import (
    PackedLinear,
    QuantizedWeight,
    linear,
    pack_empty,
    pack_many,
    quantize_rows,
    read_rows,
    write_bias,
    write_rows,
)
from quire.kernels.linear.reference import FP8
from quire.kernels.linear.triton import scaled_mm
from quire.kernels.moe import ExpertStack, experts
from quire.kernels.pointwise import gated
from quire.kernels.quantized_rows import num_groups
from quire.kernels.registry import GPU_KERNELS, Backend
from quire.weight_format import RowFormat, WeightFormat

pytestmark = WARNINGS
ROW, BLOCK = WeightFormat("fp8"), WeightFormat("fp8", 128)
CASES = [
    cases.LinearCase(1, 48, 33, bias=True),
    cases.LinearCase(17, 384, 130),
    cases.LinearCase(70, 256, 64),
]
SPLIT = cases.LinearCase(3, 2304, 40, bias=True)


def random_weight(out_features: int, in_features: int, format: WeightFormat) -> QuantizedWeight:
    rng = generator()
    q = torch.randn(out_features, in_features, generator=rng).mul(100).clamp(-448, 448).to(FP8)
    scale = torch.rand(out_features, num_groups(in_features, format.group), generator=rng) * 0.01 + 1e-3
    return QuantizedWeight(format, q, scale)


def packed_of(
    case: cases.LinearCase, format: WeightFormat, dtype: torch.dtype, backend: Backend
) -> PackedLinear:
    weight = random_weight(case.out_features, case.in_features, format)
    with torch.device("cpu" if backend == "reference" else DEVICE):
        packed = pack_empty(
            case.out_features, case.in_features, dtype, bias=case.bias, backend=backend, format=format
        )
    cut = case.out_features // 3
    write_rows(packed, cut, QuantizedWeight(format, weight.q[cut:], weight.scale[cut:]))
    write_rows(packed, 0, QuantizedWeight(format, weight.q[:cut], weight.scale[:cut]))
    if case.bias:
        write_bias(packed, 0, torch.randn(case.out_features, generator=generator(1)))
    return packed


def rows_of(case: cases.LinearCase, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(case.num_tokens, case.in_features, generator=generator(3)).to(dtype)
    x[-1] = 0.0
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
def test_few_rows_where_the_table_has_sizes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"columns": 16, "inner": 128, "chunks": 4, "stages": 3, "ahead": 8}
    asked: list[str] = []
    table = {"fp8_few": {"all": sizes}}
    monkeypatch.setattr(block_sizes, "sizes_table", lambda gpu: asked.append(gpu) or table)
    for case in (*CASES[:1], SPLIT):
        plain, packed = (packed_of(case, ROW, dtype, backend) for backend in ("reference", "triton"))
        x = rows_of(case, dtype)
        assert_close("fp8_linear", linear(x.to(DEVICE), packed).cpu(), linear(x, plain))
    assert asked


@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
@pytest.mark.parametrize("group", [None, 128])
def test_rows_have_the_bits_of_the_reference(group: int | None, dtype: torch.dtype) -> None:
    x = rows_of(cases.LinearCase(5, 300, 1), dtype)
    x[1] *= 1e-33  # next to nothing: zeros
    x[2, 7] = torch.nan
    made = quantize_rows(x.to(DEVICE), RowFormat(group), fp8=True, backend="triton")
    plain = quantize_rows(x, RowFormat(group), fp8=True)
    known = ~plain.q.float().isnan()
    assert torch.equal(made.q.cpu().float()[known], plain.q.float()[known])
    assert made.q.cpu().float().isnan()[2, 7]
    assert not made.q.cpu().float()[[0, 1, 3, 4]].isnan().any()
    fine = [0, 1, 3, 4]
    assert torch.equal(made.scale.cpu()[fine], plain.scale[fine])


@pytest.mark.parametrize("backend", GPU_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
@pytest.mark.parametrize("format", [ROW, BLOCK], ids=case_id)
@pytest.mark.parametrize(
    "case",
    [CASES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in (*CASES[1:], SPLIT))],
    ids=case_id,
)
def test_against_the_reference(
    case: cases.LinearCase, format: WeightFormat, dtype: torch.dtype, backend: Backend
) -> None:
    if format.group and case.in_features % format.group:
        format = ROW
    packed, plain = (packed_of(case, format, dtype, each) for each in (backend, "reference"))
    x = rows_of(case, dtype)
    y = linear(x.to(DEVICE), packed).cpu()
    assert y.dtype == dtype
    assert_close("fp8_linear", y, linear(x, plain, out_dtype=torch.float32).double())
    wide = linear(x.to(DEVICE), packed, out_dtype=torch.float32).cpu()
    assert_close("fp8_linear", wide, linear(x, plain, out_dtype=torch.float32).double())
    ids = torch.tensor([case.out_features - 1, 0])
    assert_same_bits(read_rows(packed, ids.to(DEVICE)).cpu(), read_rows(plain, ids), "rows")


def test_torchs_scaled_product() -> None:
    """What a GPU from 9.0 on takes for rows and columns with scales; torch has it on a CPU too."""
    case = cases.LinearCase(17, 384, 144, bias=True)
    packed, plain = (packed_of(case, ROW, torch.bfloat16, each) for each in ("triton", "reference"))
    x = rows_of(case, torch.bfloat16)
    rows = quantize_rows(x.to(DEVICE), RowFormat(), fp8=True, backend="triton")
    expected = linear(x, plain, out_dtype=torch.float32).double()
    assert_close("fp8_linear", scaled_mm(rows, packed, None).cpu(), expected)
    out = torch.zeros(17, 150, dtype=torch.bfloat16, device=DEVICE)
    scaled_mm(rows, packed, out[:, 3:147])
    assert_close("fp8_linear", out[:, 3:147].cpu(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("format", [ROW, BLOCK], ids=case_id)
def test_invariant_bits_do_not_depend_on_the_batch(format: WeightFormat) -> None:
    packed = packed_of(cases.LinearCase(1, 768, 70), format, torch.bfloat16, "invariant")
    pool = torch.randn(140, 768, generator=generator(4)).bfloat16().to(DEVICE)
    whole = linear(pool, packed)
    for rows in ([3], [139, 3, 77], list(range(70, 136))):
        assert_same_bits(linear(pool[rows], packed), whole[rows], f"{format}, {len(rows)} rows")


@pytest.mark.parametrize("backend", GPU_KERNELS)
@pytest.mark.parametrize("format", [ROW, BLOCK], ids=case_id)
def test_experts(format: WeightFormat, backend: Backend) -> None:
    """Each expert as two linears of the reference. Another rounding of the hidden rows may move one step of fp8."""
    x = torch.randn(7, 128, generator=generator(3)).bfloat16()
    ids = torch.tensor([[0, 2], [1, 2], [2, 3], [2, 0], [3, 1], [2, 1], [0, 3]])
    weights = torch.rand(7, 2, generator=generator(5))
    stacks, plain = [], []
    for seed, (out, size) in enumerate(((512, 128), (128, 256))):
        with torch.device(DEVICE):
            made = pack_many(4, out, size, torch.bfloat16, bias=False, backend=backend, format=format)
        reference = [
            pack_empty(out, size, torch.bfloat16, bias=False, backend="reference", format=format)
            for _ in range(4)
        ]
        for expert in range(4):
            q = torch.randn(out, size, generator=generator(10 * seed + expert)).mul(100).to(FP8)
            weight = QuantizedWeight(format, q, torch.full((out, num_groups(size, format.group)), 1e-3))
            write_rows(made[expert], 0, weight)
            write_rows(reference[expert], 0, weight)
        stacks.append(made)
        plain.append(reference)
    oracle = torch.zeros(7, 128, dtype=torch.float64)
    for row in range(7):
        for j in range(2):
            up, down = (each[int(ids[row, j])] for each in plain)
            part = linear(gated(linear(x[row : row + 1], up), "silu"), down, out_dtype=torch.float32)
            oracle[row] += weights[row, j].double() * part[0].double()
    y = experts.on(backend)(x.to(DEVICE), weights.to(DEVICE), ids.to(DEVICE), ExpertStack(*stacks, "silu"))
    assert_close("experts", y.cpu(), oracle)
