"""Within a tensor-parallel size: bitwise the same alone and among others, chunked, cached, preempted; any threads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from tests.exact import suite
from tests.exact.engine_run import Policy
from tests.exact.suite import Case, serve_and_check, truth_of
from tests.parallel.ranks import Helpers, RankedExecutor

from quire.kernels.registry import NATIVE_LEVELS, backends, native
from quire.models import loader
from quire.parallel.topology import Topology

pytestmark = pytest.mark.skipif(native is None, reason="the native extension is not built")
STD = 0.3
NATIVE = next((level for level in NATIVE_LEVELS if level in backends("linear")), "reference")
CASES = [
    pytest.param(Case("llama", "bfloat16", 54, 48, NATIVE, quantize="int8"), 2, id="int8"),
    pytest.param(Case("even", "bfloat16", 58, 24, NATIVE, quantize="int8"), 2, id="int8-rotated"),
    pytest.param(Case("sliding", "float32", 52, 24), 1, id="reference"),
    *(
        pytest.param(case, threads, id=f"{case.model}-{case.quantize or case.dtype}-{threads}", marks=pytest.mark.slow)
        for case, threads in (
            (Case("llama", "bfloat16", 53, 48, NATIVE), 2),
            (Case("sliding", "bfloat16", 55, 48, NATIVE, kv_dtype="int8"), 1),
            (Case("moe", "bfloat16", 56, 48, NATIVE), 2),
            (Case("latent", "bfloat16", 57, 48, NATIVE), 1),
            (Case("post_norm", "bfloat16", 58, 48, NATIVE), 1),
        )
    ),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _over_two_ranks(helpers: Helpers, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The suite's engines run over two ranks."""
    monkeypatch.setattr(loader, "STD", STD)
    monkeypatch.setattr(
        suite, "LocalExecutor", partial(RankedExecutor, topology=Topology(2), helpers=helpers, std=STD)
    )
    truth_of.cache_clear()
    yield
    truth_of.cache_clear()


@pytest.mark.parametrize(("case", "num_threads"), CASES)
def test_two_ranks_are_exact(case: Case, num_threads: int) -> None:
    tally = serve_and_check(case, Policy("continuous", "fcfs", 48), num_threads=num_threads).tally
    assert tally.num_preemptions > 0
    assert tally.num_cached_tokens > 0
    assert tally.num_chunked_prompts > 0
    assert tally.max_step_seqs > 3
