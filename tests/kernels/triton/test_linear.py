"""Linears of a GPU: plain and with int8 and int4 weights, against fp64; the invariant version's bits in any batch."""

from __future__ import annotations

import pytest
import torch
from tests.kernels import cases
from tests.kernels.checks import DTYPES, assert_close, assert_same_bits, generator
from tests.kernels.test_linear import make as make_plain
from tests.kernels.test_quantized_linear import case_id, random_weight
from tests.kernels.triton.device import DEVICE, WARNINGS

from quire.kernels import block_sizes
from quire.kernels.linear import (
    PackedLinear,
    QuantizedWeight,
    head_linear,
    linear,
    pack_empty,
    pack_heads,
    read_rows,
    triton_few,
    write_bias,
    write_rows,
)
from quire.kernels.linear import triton as triton_linear
from quire.kernels.quantized_rows import num_groups
from quire.kernels.registry import GPU_KERNELS, Backend
from quire.weight_format import WeightFormat

pytestmark = WARNINGS
PLAIN = [case for case in cases.LINEAR if not case.bench]
QUANTIZED = [case for case in cases.QUANTIZED if not case.bench]
FORMATS = [format for format in cases.FORMATS if not format.two_level]  # which is for CPUs
QUICK = {WeightFormat("int8", 32, True), WeightFormat("int4", 32), WeightFormat("int4", 128, True)}


def quantized(
    case: cases.LinearCase, format: WeightFormat, dtype: torch.dtype, backend: Backend
) -> tuple[PackedLinear, torch.Tensor, torch.Tensor]:
    """The matrix, what it stands for in fp64, and the bias."""
    weight = random_weight(case.out_features, case.in_features, format)
    repeats = format.group or case.in_features
    w = weight.q.double() * weight.scale.double().repeat_interleave(repeats, 1)[:, : case.in_features]
    if weight.offset is not None:
        w = w + weight.offset.double().repeat_interleave(repeats, 1)[:, : case.in_features]
    bias = torch.randn(case.out_features, generator=generator(1)) * case.bias
    with torch.device(DEVICE):
        packed = pack_empty(
            case.out_features, case.in_features, dtype, bias=case.bias, backend=backend, format=format
        )
    write_rows(packed, 0, weight)
    if case.bias:
        write_bias(packed, 0, bias)
    return packed, w, bias


@pytest.mark.parametrize("backend", GPU_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
@pytest.mark.parametrize("case", PLAIN, ids=case_id)
def test_plain(case: cases.LinearCase, dtype: torch.dtype, backend: Backend) -> None:
    with torch.device(DEVICE):
        packed = pack_empty(case.out_features, case.in_features, dtype, bias=case.bias, backend=backend)
    _, weight, bias = make_plain(case, dtype, "reference")
    write_rows(packed, 0, weight)
    if case.bias:
        write_bias(packed, 0, bias)
    x = torch.randn(case.num_tokens, case.in_features, generator=generator(3)).to(dtype)
    oracle = x.double() @ weight.double().T + bias.double()
    assert_close("linear", linear(x.to(DEVICE), packed).cpu(), oracle)
    wide = linear(x.to(DEVICE), packed, out_dtype=torch.float32).cpu()
    assert wide.dtype == torch.float32
    assert_close("linear", wide.to(dtype), oracle)
    ids = torch.tensor([case.out_features - 1, 0])
    assert_same_bits(read_rows(packed, ids.to(DEVICE)).cpu(), weight[ids], "rows")


@pytest.mark.parametrize("backend", GPU_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
@pytest.mark.parametrize(
    ("case", "format"),
    [
        pytest.param(
            case, format, marks=() if format in QUICK and case.in_features < 140 else pytest.mark.slow
        )
        for case in QUANTIZED
        for format in FORMATS
    ],
    ids=case_id,
)
def test_quantized(
    case: cases.LinearCase, format: WeightFormat, dtype: torch.dtype, backend: Backend
) -> None:
    """Plain rows times what the integers, scales and offsets stand for."""
    packed, weight, bias = quantized(case, format, dtype, backend)
    x = torch.randn(case.num_tokens, case.in_features, generator=generator(3)).to(dtype)
    y = linear(x.to(DEVICE), packed).cpu()
    assert y.dtype == dtype
    assert_close("quantized_linear", y, x.double() @ weight.T + bias.double())
    ids = torch.tensor([case.out_features - 1, 0])
    assert_close("quantized_linear", read_rows(packed, ids.to(DEVICE)).cpu(), weight[ids])


def test_matrices_written_in_parts() -> None:
    case, format = cases.LinearCase(3, 192, 70), WeightFormat("int4", 64, True)
    whole, _, _ = quantized(case, format, torch.bfloat16, "triton")
    weight = random_weight(70, 192, format)
    with torch.device(DEVICE):
        parts = pack_empty(70, 192, torch.bfloat16, bias=False, backend="triton", format=format)
    for rows in (slice(23, 70), slice(0, 23)):
        assert weight.offset is not None
        write_rows(
            parts,
            rows.start,
            QuantizedWeight(format, weight.q[rows], weight.scale[rows], weight.offset[rows]),
        )
    assert num_groups(192, 64) == 3, "an odd number of groups: the last has no pair"
    assert torch.equal(parts.data, whole.data)
    assert torch.equal(
        read_rows(parts, torch.arange(70).to(DEVICE)), read_rows(whole, torch.arange(70).to(DEVICE))
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
@pytest.mark.parametrize(
    "format", [WeightFormat(), WeightFormat("int8", None, True), WeightFormat("int4", 64)], ids=case_id
)
@pytest.mark.parametrize(
    "shapes", [pytest.param([(100, 70)]), pytest.param([(100, 70), (1300, 40)], marks=pytest.mark.slow)]
)
def test_invariant_bits_do_not_depend_on_the_batch(
    shapes: list[tuple[int, int]], format: WeightFormat, dtype: torch.dtype
) -> None:
    """One row, a tile's worth and more (other tiles), with the inputs split and not."""
    for in_features, out_features in shapes:
        case = cases.LinearCase(1, in_features, out_features)
        if format.quantized:
            packed, _, _ = quantized(case, format, dtype, "invariant")
        else:
            with torch.device(DEVICE):
                packed = pack_empty(out_features, in_features, dtype, bias=False, backend="invariant")
            write_rows(packed, 0, make_plain(case, dtype, "reference")[1])
        pool = torch.randn(140, in_features, generator=generator(4)).to(dtype).to(DEVICE)
        whole = linear(pool, packed)
        for rows in ([3], [139, 3, 77], list(range(70, 136))):
            assert_same_bits(linear(pool[rows], packed), whole[rows], f"{format}, {len(rows)} rows")


@pytest.mark.parametrize("backend", GPU_KERNELS)
def test_splits_of_the_inputs_are_added(backend: Backend) -> None:
    """1,100 inputs are two splits, whose sums the last program of a tile adds."""
    case = cases.LinearCase(3, 1100, 70, bias=True)
    packed, weight, bias = quantized(case, WeightFormat("int8"), torch.bfloat16, backend)
    x = torch.randn(3, 1100, generator=generator(3)).bfloat16()
    for _ in range(2):  # the tickets are zeros again
        y = linear(x.to(DEVICE), packed).cpu()
        assert_close("quantized_linear", y, x.double() @ weight.T + bias.double())


FEW = [
    WeightFormat(),
    WeightFormat("int8"),
    WeightFormat("int8", None, True),
    WeightFormat("int4", 128),
    WeightFormat("int4", 128, True),
]


@pytest.mark.parametrize(
    ("chunks", "format"),
    [
        pytest.param(n, f, marks=[pytest.mark.slow] * ((n, f) not in ((1, FEW[0]), (4, FEW[-1]))))
        for n in (1, 4)
        for f in FEW
    ],
    ids=case_id,
)
def test_few_rows_where_the_table_has_sizes(
    format: WeightFormat, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 16 rows of bf16, whatever the matrix's size; int8 with an offset per feature goes another way."""
    sizes = {"columns": 16, "inner": 64, "chunks": chunks, "stages": 3, "ahead": 8}
    ops = ("plain_few", "int8_few", "int4_g128_few")
    monkeypatch.setattr(block_sizes, "sizes_table", lambda gpu: {op: {"all": sizes} for op in ops})
    launched: list[int] = []
    monkeypatch.setattr(
        triton_linear,
        "few_rows",
        lambda x, *rest: launched.append(len(x)) or triton_few.few_rows(x, *rest),
    )
    for in_features, out_features in ((1100, 70), (40, 33), (1024, 16)):
        case = cases.LinearCase(3, in_features, out_features, bias=True)
        if format.quantized:
            packed, weight, bias = quantized(case, format, torch.bfloat16, "triton")
        else:
            with torch.device(DEVICE):
                packed = pack_empty(out_features, in_features, torch.bfloat16, bias=True, backend="triton")
            _, weight, bias = make_plain(case, torch.bfloat16, "reference")
            write_rows(packed, 0, weight)
            write_bias(packed, 0, bias)
        x = torch.randn(17, in_features, generator=generator(3)).bfloat16()
        oracle = x.double() @ weight.double().T + bias.double()
        for rows in (1, 16, 17) if in_features == 1100 else (16,):
            y = linear(x[:rows].to(DEVICE), packed).cpu()
            assert_close("linear", y, oracle[:rows])
            wide = linear(x[:rows].to(DEVICE), packed, out_dtype=torch.float32).cpu()
            assert_close("linear", wide.bfloat16(), oracle[:rows])
    assert set(launched) == (set() if format == FEW[2] else {1, 16}), "more rows go another way"


@pytest.mark.parametrize("backend", GPU_KERNELS)
def test_heads(backend: Backend) -> None:
    weight = torch.randn(3, 7, 33, generator=generator())
    x = torch.randn(5, 3, 7, generator=generator(1))
    y = head_linear(x.to(DEVICE), pack_heads(weight.to(DEVICE), backend=backend))
    assert_close("head_linear", y.cpu(), torch.einsum("thi,hio->tho", x.double(), weight.double()))
