"""Experts over two ranks, in two processes: the bits of one process, in every batch and while experts move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.exact import suite
from tests.exact.engine_run import Policy
from tests.exact.suite import Case, serve_and_check, truth_of
from tests.parallel.ranks import Helpers, RankedExecutor, RankedWorker
from tests.parity import harness
from tests.parity.families import CONTEXT, make

from quire.config import EngineConfig, ExpertsConfig
from quire.kernels.registry import NATIVE_LEVELS, backends, native
from quire.models import loader
from quire.parallel.topology import Topology

pytestmark = pytest.mark.skipif(native is None, reason="the native extension is not built")
STD = 0.3
NATIVE = next((level for level in NATIVE_LEVELS if level in backends("linear")), "reference")
POLICY = Policy("continuous", "fcfs", 48)
PLAIN, MORE = Topology(ep=2), Topology(ep=2, redundant_experts=2)
CASES = [
    pytest.param(Case("moe", "float32", 60, 24), MORE, 2, 1, id="reference-moves"),
    pytest.param(Case("latent", "bfloat16", 57, 32, NATIVE, quantize="int8"), MORE, 3, 1, id="latent-int8-moves"),
    *(
        pytest.param(case, topology, interval, threads, marks=pytest.mark.slow, id=f"{case}-{interval}-{threads}")
        for case, topology, interval, threads in (
            (Case("moe", "bfloat16", 56, 48, NATIVE), PLAIN, 0, 1),
            (Case("moe", "bfloat16", 61, 48, NATIVE, quantize="int4"), MORE, 1, 2),
            (Case("latent", "float32", 62, 48), PLAIN, 5, 2),
            (Case("latent", "bfloat16", 63, 48, NATIVE, quantize="int8"), Topology(ep=3), 2, 1),
        )
    ),
]  # fmt: skip


class Moving(RankedExecutor):
    """Experts are balanced every ``interval`` steps; 0: never."""

    def __init__(self, config: EngineConfig, *, interval: int, topology: Topology, helpers: Helpers) -> None:
        if interval:
            config = replace(config, experts=ExpertsConfig(True, interval))
        super().__init__(config, topology, helpers, STD)


@pytest.fixture(autouse=True)
def _wide_weights(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loader, "STD", STD)
    truth_of.cache_clear()
    yield
    truth_of.cache_clear()


@pytest.mark.parametrize(("case", "topology", "interval", "num_threads"), CASES)
def test_two_ranks_give_the_bits_of_one_process(
    case: Case, topology: Topology, interval: int, num_threads: int, helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Logits of every token, in batches, chunks, from the cache and after preemptions."""
    truth_of(case)  # of one process
    made = []

    def executor(config: EngineConfig) -> Moving:
        made.append(Moving(config, interval=interval, topology=topology, helpers=helpers))
        return made[-1]

    monkeypatch.setattr(suite, "LocalExecutor", executor)
    tally = serve_and_check(case, POLICY, num_threads=num_threads).tally
    assert tally.num_draws > 100
    assert tally.num_preemptions > 0
    assert tally.num_cached_tokens > 0
    assert tally.num_chunked_prompts > 0
    assert tally.max_step_seqs > 3
    loads = made[0].worker.loads
    assert bool(loads) == bool(interval)
    if interval:
        assert sum(load.num_moved for load in loads) > 0
        assert all(load.of_ranks_balanced <= load.of_ranks for load in loads)


@pytest.mark.parametrize(
    "case",
    ["mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in (
        "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3",
    ))],
)  # fmt: skip
def test_family_with_experts_over_two_ranks(
    case: str, tmp_path: Path, helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of transformers, from a checkpoint of which each rank reads its experts."""
    ranked = partial(RankedWorker, topology=Topology(ep=2, redundant_experts=1), helpers=helpers)
    monkeypatch.setattr(harness, "Worker", lambda config, weights, clock: ranked(config))
    model = make(case, tmp_path)
    harness.check(tmp_path, model, CONTEXT)
