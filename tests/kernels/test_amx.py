"""The amx level: rows of a tile do not know each other, and tile state is a matter of one thread and one call."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.kernels import cases
from tests.kernels.checks import assert_same_bits, generator, threads
from tests.kernels.test_quantized_linear import random_weight

from quire.kernels import registry
from quire.kernels.linear import PackedLinear, linear, pack_empty, quantize_rows, write_bias, write_rows
from quire.weight_format import WeightFormat

if "amx" not in registry.backends("linear"):
    pytest.skip("this CPU or build has no AMX: make test-amx emulates its tiles", allow_module_level=True)

NUM_ROWS = 70
LEVELS: tuple[registry.Backend, ...] = ("amx", "avx512")


def packed(
    in_features: int, out_features: int, dtype: torch.dtype, backend: registry.Backend
) -> PackedLinear:
    rng = generator()
    made = pack_empty(out_features, in_features, dtype, bias=True, backend=backend)
    write_rows(made, 0, torch.randn(out_features, in_features, generator=rng).to(dtype))
    write_bias(made, 0, torch.randn(out_features, generator=rng).to(dtype))
    return made


@pytest.mark.parametrize("in_features", [1, 2, 31, 32, 33, 63, 64, 577, 2048])
@pytest.mark.parametrize("out_features", [1, 31, 33, 100])
def test_every_number_of_rows_gives_the_same_bits(in_features: int, out_features: int) -> None:
    weight = packed(in_features, out_features, torch.bfloat16, "amx")
    pool = torch.randn(NUM_ROWS, in_features, generator=generator(3)).bfloat16()
    with threads(1):
        alone = torch.cat([linear(pool[row : row + 1], weight) for row in range(NUM_ROWS)])
    for count in (1, 2):
        with threads(count):
            for rows in range(1, NUM_ROWS + 1):
                first = rows * 7 % (NUM_ROWS - rows + 1)  # another place in the tile than alone
                what = f"{in_features} x {out_features}, {rows} rows from {first}, {count} threads"
                assert_same_bits(
                    linear(pool[first : first + rows], weight), alone[first : first + rows], what
                )


def test_more_rows_than_a_pass() -> None:
    weight = packed(96, 130, torch.bfloat16, "amx")
    pool = torch.randn(1100, 96, generator=generator(4)).bfloat16()
    with threads(2):
        whole = linear(pool, weight)
        for row in (0, 255, 256, 511, 512, 1023, 1024, 1099):
            assert_same_bits(linear(pool[row : row + 1], weight), whole[row : row + 1], f"row {row}")


@pytest.mark.parametrize("out_features", [1792, 130])
def test_rows_in_chunks_and_results_past_the_caches(out_features: int) -> None:
    """More rows of more k than L2 holds are taken in chunks of k; more than a MiB of whole lines is streamed out."""
    weight = packed(2081, out_features, torch.bfloat16, "amx")
    pool = torch.randn(310, 2081, generator=generator(9)).bfloat16()
    with threads(2):
        whole = linear(pool, weight)
        for row in (0, 15, 16, 33, 254, 256, 300, 309):
            assert_same_bits(linear(pool[row : row + 1], weight), whole[row : row + 1], f"row {row}")
        wide = linear(pool, weight, out_dtype=torch.float32)
    assert_same_bits(wide.bfloat16(), whole, "fp32 results")


@pytest.mark.parametrize("num_rows", [5, 20])
def test_what_lies_behind_a_row_does_not_count(num_rows: int) -> None:
    """k = 40 and 33: the last step of 32 k reaches beyond the row, where NaNs lie here; one tile of rows and two."""
    for in_features in (33, 40):
        weight = packed(in_features, 64, torch.bfloat16, "amx")
        wide = torch.full((num_rows, 80), float("nan"), dtype=torch.bfloat16)
        even = in_features + in_features % 2
        wide[:, :even] = 0
        wide[:, :in_features] = torch.randn(num_rows, in_features, generator=generator(5)).bfloat16()
        rows = wide[:, :in_features]
        assert_same_bits(linear(rows, weight), linear(rows.contiguous(), weight), f"{in_features}")


def test_streamed_results_end_with_the_matrix() -> None:
    """More than a MiB of bf16 results goes past the caches in whole lines, but for a last panel that is not whole."""
    weight = packed(64, 1800, torch.bfloat16, "amx")
    x = torch.randn(310, 64, generator=generator(11)).bfloat16()
    memory = torch.full((310 * 1824 + 32,), 7.0).bfloat16()
    lines = memory[-memory.data_ptr() % 64 // 2 :][: 310 * 1824].view(310, 1824)
    found = linear(x, weight, out=lines[:, :1800])
    assert_same_bits(found.contiguous(), linear(x, weight), "streamed")
    assert (lines[:, 1800:] == 7.0).all()


def test_fp32_runs_on_avx512() -> None:
    """The level is whole: what has no version for tiles is avx512's."""
    weight, x = packed(64, 48, torch.float32, "amx"), torch.randn(5, 64)
    other = packed(64, 48, torch.float32, "avx512")
    assert_same_bits(linear(x, weight), linear(x, other), "fp32")


@pytest.mark.parametrize("format", cases.FORMATS, ids=str)
@pytest.mark.parametrize("in_features", [3, 65, 577, 1200])
def test_quantized_weights_give_the_bits_of_avx512(in_features: int, format: WeightFormat) -> None:
    """From one row, which avx512 does itself by groups, to parts of tiles and more rows than a pass takes."""
    weight = random_weight(300, in_features, format)
    by_level = {}
    for level in LEVELS:
        by_level[level] = pack_empty(
            300, in_features, torch.bfloat16, bias=True, backend=level, format=format
        )
        write_rows(by_level[level], 0, weight)
        write_bias(by_level[level], 0, torch.randn(300, generator=generator(7)))
    x = torch.randn(1100, in_features, generator=generator(8)).bfloat16()
    for count in (1, 2):
        with threads(count):
            for rows in (1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 49, 511, 513, 1100):
                quantized = quantize_rows(x[1100 - rows :], format.rows, backend="avx512")
                actual, expected = (linear(quantized, by_level[level]) for level in LEVELS)
                assert_same_bits(actual, expected, f"{format}, {in_features} k, {rows} rows, {count} threads")


@pytest.mark.parametrize(
    "format", [WeightFormat("int8"), WeightFormat("int4", 32), WeightFormat("int4", 16)], ids=str
)
def test_quantized_rows_in_chunks_and_results_past_the_caches(format: WeightFormat) -> None:
    """As for bf16 above: int8 takes long rows in chunks of k, int4 in smaller passes; results are streamed out."""
    weight = random_weight(1088, 4200, format)
    quantized = quantize_rows(
        torch.randn(500, 4200, generator=generator(10)).bfloat16(), format.rows, backend="avx512"
    )
    results = []
    for level in LEVELS:
        held = pack_empty(1088, 4200, torch.bfloat16, bias=False, backend=level, format=format)
        write_rows(held, 0, weight)
        with threads(2):
            results.append(linear(quantized, held))
    assert_same_bits(results[0], results[1], str(format))


def test_engines_of_one_process_do_not_disturb_each_other() -> None:
    """Calls of several threads with several pools, each call with tiles of another shape."""
    weight = packed(256, 512, torch.bfloat16, "amx")
    pool = torch.randn(NUM_ROWS, 256, generator=generator(6)).bfloat16()
    with threads(2):
        expected = {rows: linear(pool[:rows], weight) for rows in range(1, NUM_ROWS)}

        def serve(start: int) -> None:
            for i in range(150):
                rows = 1 + (start + 11 * i) % (NUM_ROWS - 1)
                assert_same_bits(linear(pool[:rows], weight), expected[rows], f"{rows} rows beside others")

        with ThreadPoolExecutor(4) as workers:
            list(workers.map(serve, range(4)))
