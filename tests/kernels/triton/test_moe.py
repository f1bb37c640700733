"""Grouped products of experts against a loop in fp64; the invariant version's bits in any batch."""

from __future__ import annotations

import pytest
import torch
from tests.kernels import cases
from tests.kernels.checks import DTYPES, assert_close, assert_same_bits, generator
from tests.kernels.test_moe import make_route
from tests.kernels.triton.device import DEVICE, WARNINGS

from quire.kernels.linear import pack_many, read_rows, write_bias, write_rows
from quire.kernels.moe import ExpertStack, experts, route
from quire.kernels.moe.triton import cut_tiles
from quire.kernels.registry import GPU_KERNELS, Backend
from quire.quant.rtn import quantize
from quire.weight_format import PLAIN, WeightFormat

pytestmark = WARNINGS
INT4 = WeightFormat("int4", 32, False)


def make(
    case: cases.MoeCase, dtype: torch.dtype, backend: Backend, format: WeightFormat, *, bias: bool
) -> tuple[ExpertStack, list[tuple[torch.Tensor, ...]]]:
    """Experts, and the matrices and biases that they hold."""
    rng = generator()
    inter, hidden, count = case.spec.intermediate_size, case.hidden_size, case.spec.num_experts
    lists, plain = [], [[] for _ in range(count)]  # type: ignore[var-annotated]
    for out, size in ((2 * inter, hidden), (hidden, inter)):
        with torch.device(DEVICE):
            matrices = pack_many(count, out, size, dtype, bias=bias, backend=backend, format=format)
        for packed, parts in zip(matrices, plain, strict=True):
            weight = torch.randn(out, size, generator=rng).to(dtype)
            own = torch.randn(out, generator=rng).to(dtype) * bias
            write_rows(packed, 0, quantize(weight, format) if format.quantized else weight)
            if bias:
                write_bias(packed, 0, own)
            parts += [read_rows(packed, torch.arange(out).to(DEVICE)).cpu(), own]
        lists.append(matrices)
    return ExpertStack(*lists, "silu"), [tuple(parts) for parts in plain]


def run(
    stack: ExpertStack, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, backend: Backend
) -> torch.Tensor:
    return experts.on(backend)(x.to(DEVICE), weights.to(DEVICE), ids.to(DEVICE), stack).cpu()


@pytest.mark.parametrize("backend", GPU_KERNELS)
@pytest.mark.parametrize(
    ("case", "dtype", "format", "bias"),
    [
        pytest.param(
            case, dtype, format, bias,
            marks=() if case.name in ("gpt-oss", "no tokens") and (format.quantized or bias) else pytest.mark.slow,
        )
        for case in cases.MOE
        for dtype in DTYPES
        for format, bias in ((PLAIN, True), (PLAIN, False), (INT4, True))
    ],
)  # fmt: skip
def test_against_a_loop(
    case: cases.MoeCase, dtype: torch.dtype, format: WeightFormat, bias: bool, backend: Backend
) -> None:
    stack, plain = make(case, dtype, backend, format, bias=bias)
    x = torch.randn(case.num_tokens, case.hidden_size, generator=generator(3)).to(dtype)
    weights, ids = route(
        *(make_route(case, case.num_tokens)[0], case.spec), make_route(case, case.num_tokens)[1]
    )
    oracle = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(case.num_tokens):
        for j in range(case.spec.top_k):
            up_w, up_b, down_w, down_b = (part.double() for part in plain[int(ids[row, j])])
            gate, up = (up_w @ x[row].double() + up_b).chunk(2)
            oracle[row] += weights[row, j].double() * (down_w @ (gate * gate.sigmoid() * up) + down_b)
    assert_close("experts", run(stack, x, weights, ids, backend), oracle)


def test_invariant_bits_do_not_depend_on_the_batch() -> None:
    case = cases.MOE[0]
    stack, _ = make(case, torch.bfloat16, "invariant", PLAIN, bias=False)
    pool = torch.randn(40, case.hidden_size, generator=generator(4)).bfloat16()
    weights, ids = route(make_route(case, 40)[0], case.spec, None)
    whole = run(stack, pool, weights, ids, "invariant")
    for rows in ([3], [39, 3, 20]):
        assert_same_bits(
            run(stack, pool[rows], weights[rows], ids[rows], "invariant"), whole[rows], f"{rows}"
        )


@pytest.mark.parametrize("chosen", [[0], [2, 2, 2, 2, 2], [0, 0, 0, 1, 3, 3], [3]])
def test_tiles_cover_every_row_once(chosen: list[int]) -> None:
    tiles = cut_tiles(torch.tensor(chosen).to(DEVICE), 4, 2).tolist()
    covered = [
        (expert, row)
        for expert, first, end in tiles
        for row in range(first, min(first + 2, end))
        if first < end
    ]
    assert covered == [(expert, row) for row, expert in enumerate(chosen)]
