"""Within a context-parallel size: bitwise the same alone and among others, chunked, cached, preempted; any threads.

A prompt alone is one step, in which the ranks divide its rows; among others they do so in some steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Striped(Case):
    @property
    def block_size(self) -> int:
        """16 on each of two ranks where the cache may lie in tiles."""
        return 32 if self.dtype == "bfloat16" else 8


LONG = partial(Striped, dtype="bfloat16", num_requests=32, cpu_isa=NATIVE, max_output=40)
CASES = [
    pytest.param(LONG("llama", seed=54, num_requests=24, quantize="int8"), 2, id="int8"),
    pytest.param(Striped("sliding", "float32", 52, 24), 1, id="reference"),
    *(
        pytest.param(case, threads, id=f"{case.model}-{case.kv_dtype or case.dtype}-{threads}", marks=pytest.mark.slow)
        for case, threads in (
            (LONG("llama", seed=53), 1),
            (LONG("llama", seed=53), 2),
            (LONG("sliding", seed=55, kv_dtype="int8"), 1),
            (LONG("moe", seed=56), 2),
            (LONG("latent", seed=57), 1),
            (LONG("post_norm", seed=58), 1),
        )
    ),
]  # fmt: skip


@pytest.fixture(
    autouse=True, params=[Topology(cp=2), pytest.param(Topology(cp=2, tp=2), marks=pytest.mark.slow)], ids=str
)
def _over_ranks(
    request: pytest.FixtureRequest, helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The suite's engines run over ranks."""
    monkeypatch.setattr(loader, "STD", STD)
    monkeypatch.setattr(
        suite, "LocalExecutor", partial(RankedExecutor, topology=request.param, helpers=helpers, std=STD)
    )
    truth_of.cache_clear()
    yield
    truth_of.cache_clear()


@pytest.mark.parametrize("budget", [48, pytest.param(256, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("case", "num_threads"), CASES)
def test_two_stripes_are_exact(case: Case, num_threads: int, budget: int) -> None:
    tally = serve_and_check(case, Policy("continuous", "fcfs", budget), num_threads=num_threads).tally
    assert tally.num_preemptions > 0
    assert tally.num_cached_tokens > 0
    assert tally.num_chunked_prompts > 0 or budget > 100
    assert tally.max_step_seqs >= 3
