"""What every op's test does: compare with an fp64 oracle, and compare bits between batches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.kernels.tolerances import tolerance

from quire.config import RunnerConfig
from quire.kernels.quantized_rows import QuantizedRows
from quire.kernels.threads import choose_threads

DTYPES = (torch.float32, torch.bfloat16)
SEED = 20261120


def runner_config(kernels: str = "reference", num_threads: int = 1) -> RunnerConfig:
    """The configuration of ``kernels``, as `RunnerConfig.kernels` names them."""
    if kernels in ("triton", "invariant"):
        return RunnerConfig(num_threads, "triton", batch_invariant=kernels == "invariant")
    return (
        RunnerConfig(num_threads) if kernels == "reference" else RunnerConfig(num_threads, "native", kernels)
    )


def each(name: str, values: Sequence[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with ``name`` set to each of ``values`` in turn; a failure says which one it was.

    Like `pytest.mark.parametrize` within one test: what pytest does for a test takes longer than a small call of a
    kernel. Values that skip are left out, and the test skips where all do.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**rest: Any) -> None:
            skipped = None
            num_run = 0
            for value in values:
                try:
                    test(**rest, **{name: value})
                    num_run += 1
                except pytest.skip.Exception as skip:
                    skipped = skip
                except BaseException as error:
                    error.add_note(f"{name}: {value}")
                    raise
            if skipped is not None and num_run == 0:
                raise skipped

        signature = inspect.signature(test)
        rest = [parameter for key, parameter in signature.parameters.items() if key != name]
        run.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return run

    return decorate


def generator(seed: int = SEED) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run torch with ``count`` threads."""
    before = torch.get_num_threads()
    choose_threads(count, torch_is_heavy=True)  # torch's and the native kernels' alike
    try:
        yield
    finally:
        choose_threads(before, torch_is_heavy=True)


def assert_close(op: str, actual: torch.Tensor, oracle: torch.Tensor, backend: str = "") -> None:
    """Every element within the op's tolerance of the oracle's largest magnitude."""
    assert actual.shape == oracle.shape
    if oracle.numel() == 0:
        return
    error = (actual.double() - oracle).abs().max().item() / max(oracle.abs().max().item(), 1e-30)
    bound = tolerance(op, actual.dtype)
    assert error <= bound, f"{op} {backend} {actual.dtype}: error {error:.3g} > {bound:.3g} (seed {SEED})"


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Equal bit for bit (and no NaN on either side)."""
    assert actual.dtype == expected.dtype
    assert not torch.isnan(expected).any(), what
    assert torch.equal(actual, expected), (
        f"{what}: {(actual != expected).sum()} of {actual.numel()} elements differ (seed {SEED})"
    )


def assert_same_rows(actual: QuantizedRows, expected: QuantizedRows, what: str = "rows") -> None:
    """Equal int8 rows: values, padding, scales and sums."""
    for name in ("q", "scale", "sums"):
        same = torch.equal(getattr(actual, name), getattr(expected, name))
        assert same, f"{what}: {name} differ (seed {SEED})"
    assert (actual.in_features, actual.format, actual.dtype) == (
        expected.in_features,
        expected.format,
        expected.dtype,
    )


def assert_rows_independent(
    run: Callable[[torch.Tensor], torch.Tensor],
    num_rows: int,
    what: str,
    batches: Sequence[int] = (1, 2, 7, 33),
) -> None:
    """``run(ids)`` computes the rows ``ids`` of a fixed pool of ``num_rows`` as one batch, in that order.

    Every row must have the bits that it has alone: in batches of several sizes, at random places among random
    others, with one thread and with two.
    """
    with threads(1):
        alone = torch.cat([run(torch.tensor([row])) for row in range(num_rows)])
    rng = generator(SEED + 1)
    for count in (1, 2):
        with threads(count):
            for size in (*batches, num_rows):
                ids = torch.randint(num_rows, (size,), generator=rng)
                assert_same_bits(run(ids), alone[ids], f"{what}, batch of {size}, {count} threads")
