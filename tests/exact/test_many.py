"""The numbers that README and docs name: alone or in a batch of 256, and with any number of threads."""

from __future__ import annotations

import pytest
from tests.exact.engine_run import Policy
from tests.exact.suite import Case, serve_and_check

from quire.kernels.registry import NATIVE_LEVELS, backends
from quire.models import loader
from quire.models.hub import quill_path

LEVEL = next((level for level in NATIVE_LEVELS if level in backends("linear")), None)
needs_native = pytest.mark.skipif(LEVEL is None, reason="the native extension is not built")
# Room for all prompts in one step, so that all requests decode together from the second step on.
ALL_AT_ONCE = Policy("continuous", "fcfs", 2**15)


@pytest.fixture(autouse=True)
def lively_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "STD", 0.3)


def check_256(model: str, dtype: str, cpu_isa: str, **shape: int) -> None:
    case = Case(
        model, dtype, 81, num_requests=256, cpu_isa=cpu_isa, crowd=True, **({"max_output": 6} | shape)
    )
    tally = serve_and_check(case, ALL_AT_ONCE).tally
    assert tally.max_step_seqs == 256
    assert tally.num_full_steps >= case.max_output
    assert tally.num_draws == 256 * case.max_output


@pytest.mark.slow
def test_a_batch_of_256_equals_alone() -> None:
    check_256("llama", "float32", "reference")


@needs_native
@pytest.mark.parametrize("model", ["llama", "sliding", "moe"])
def test_a_native_batch_of_256_equals_alone(model: str) -> None:
    assert LEVEL is not None
    check_256(model, "bfloat16", LEVEL)


@needs_native
def test_a_batch_of_256_on_quill_equals_alone() -> None:
    assert LEVEL is not None
    check_256(str(quill_path("quill")), "bfloat16", LEVEL)


@needs_native
@pytest.mark.parametrize(
    ("model", "dtype", "num_threads"),
    [
        pytest.param(model, dtype, n, marks=[pytest.mark.slow] * (n != chosen))
        for model, dtype, chosen in (
            ("llama", "float32", 7),
            ("sliding", "bfloat16", 3),
            ("moe", "bfloat16", 2),
        )
        for n in (2, 3, 7)
    ],
)
def test_any_number_of_threads_equals_one(model: str, dtype: str, num_threads: int) -> None:
    assert LEVEL is not None
    case = Case(model, dtype, 82, num_requests=24, cpu_isa=LEVEL)
    serve_and_check(case, Policy("continuous", "fcfs", 48), num_threads=num_threads)


@needs_native
@pytest.mark.parametrize("num_threads", [2, 3, 7])
def test_threads_do_not_change_a_crowd(num_threads: int) -> None:
    assert LEVEL is not None
    case = Case("llama", "bfloat16", 83, num_requests=96, cpu_isa=LEVEL, crowd=True, max_output=5)
    assert serve_and_check(case, ALL_AT_ONCE, num_threads=num_threads).tally.max_step_seqs == 96
