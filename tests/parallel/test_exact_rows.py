"""Dense models over ranks by rows: the bits of one process, in every batch, whatever the sizes divide into."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.exact import suite
from tests.exact.engine_run import Policy
from tests.exact.models import MODELS
from tests.exact.suite import Case, serve_and_check, truth_of
from tests.lora.peft_files import make_adapters
from tests.parallel.ranks import Helpers, RankedExecutor
from tests.parallel.serving import FCFS, QUILL, config_of, serve

from quire.args import EngineArgs
from quire.config import DeviceInfo
from quire.executor.ranks import RanksExecutor
from quire.kernels.registry import NATIVE_LEVELS, backends, native
from quire.models import loader
from quire.parallel.topology import Topology
from quire.resolve import resolve

pytestmark = pytest.mark.skipif(native is None, reason="the native extension is not built")
STD = 0.3
NATIVE = next((level for level in NATIVE_LEVELS if level in backends("linear")), "reference")
POLICY = Policy("continuous", "fcfs", 48)
TWO, THREE = Topology(ep=2), Topology(ep=3)
CASES = [
    pytest.param(Case("llama", "bfloat16", 54, 24, NATIVE, quantize="int8"), TWO, 1, id="int8"),
    pytest.param(Case("even", "bfloat16", 67, 24, NATIVE, quantize="int8"), TWO, 1, id="int8-rotated"),
    pytest.param(Case("sliding", "float32", 60, 16), THREE, 1, id="reference-3"),
    *(
        pytest.param(case, topology, threads, marks=pytest.mark.slow, id=f"{case}-{topology.ep}-{threads}")
        for case, topology, threads in (
            (Case("llama", "bfloat16", 61, 48, NATIVE), TWO, 2),
            (Case("llama", "bfloat16", 62, 48, NATIVE, quantize="int4"), TWO, 1),
            (Case("llama", "bfloat16", 66, 48, NATIVE, quantize="int8"), THREE, 1),
            (Case("sliding", "bfloat16", 64, 48, NATIVE, kv_dtype="int8"), TWO, 2),
            (Case("post_norm", "bfloat16", 65, 48, NATIVE), TWO, 1),
        )
    ),
]  # fmt: skip


@pytest.fixture
def _wide_weights(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loader, "STD", STD)
    truth_of.cache_clear()
    yield
    truth_of.cache_clear()


def test_dense_models_are_cut_by_rows_by_default() -> None:
    """And have the cache of one process, which that of partial sums must not be taken for."""
    machine = DeviceInfo("cpu", "test", 2, 2**33, 2**33)
    found = {}
    for name, sizes in {
        "one": {},
        "auto": {"tensor_parallel_size": 2},
        "sums": {"tensor_parallel_size": 2, "tensor_parallel_layout": "sums"},
    }.items():
        found[name] = resolve(EngineArgs(**sizes), MODELS["llama"](), machine)  # type: ignore[arg-type]
    assert found["auto"].topology == TWO
    assert found["sums"].topology == Topology(tp=2)
    assert found["auto"].cache.model_key == found["one"].cache.model_key != found["sums"].cache.model_key
    experts = resolve(EngineArgs(tensor_parallel_size=2), MODELS["moe"](), machine)
    assert experts.topology == Topology(tp=2)


@pytest.mark.usefixtures("_wide_weights")
@pytest.mark.parametrize(("case", "topology", "num_threads"), CASES)
def test_ranks_give_the_bits_of_one_process(
    case: Case, topology: Topology, num_threads: int, helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of every token; heads, intermediate size and vocabulary do not divide by two or three."""
    truth_of(case)  # of one process
    over_ranks = partial(RankedExecutor, topology=topology, helpers=helpers, std=STD)
    monkeypatch.setattr(suite, "LocalExecutor", over_ranks)
    tally = serve_and_check(case, POLICY, num_threads=num_threads).tally
    assert tally.num_draws > 100
    assert tally.num_preemptions > 0
    assert tally.num_cached_tokens > 0
    assert tally.num_chunked_prompts > 0
    assert tally.max_step_seqs > 3


@pytest.mark.parametrize(
    ("model", "topology", "drafts"),
    [
        (QUILL, TWO, "ngram"),
        *(
            pytest.param(*more, marks=pytest.mark.slow)
            for more in (
                (QUILL, Topology(ep=2, pp=2), "none"),
                ("llama", TWO, "self"),
                ("sliding", Topology(ep=2, pp=2), "ngram"),
            )
        ),
    ],
    ids=str,
)
def test_processes_give_the_tokens_of_one(model: str, topology: Topology, drafts: str) -> None:
    """Processes as the engine starts them, with stages or drafts beside."""
    case = Case(model, "bfloat16", 71, num_requests=8, cpu_isa=NATIVE, max_prompt=60, max_output=16)
    policy = Policy("continuous", "fcfs", 48, drafts)  # type: ignore[arg-type]
    executor = RanksExecutor(config_of(case, topology, policy))
    try:
        tally = serve(case, executor, config_of(case, topology, policy), policy).tally
    finally:
        executor.close()
    assert tally.num_chunked_prompts > 0


@pytest.mark.parametrize(
    "quantize", [pytest.param(None, marks=pytest.mark.slow), "int8"], ids=["bf16", "int8"]
)
def test_adapters_over_ranks_are_those_of_one_process(quantize: str | None, tmp_path: Path) -> None:
    """Three adapters and the base model over two slots."""
    adapters = make_adapters(tmp_path, MODELS["llama"]())
    case = Case("llama", "bfloat16", 31, 12, NATIVE, quantize=quantize, adapters=adapters)
    executor = RanksExecutor(config_of(case, TWO))
    try:
        tally = serve(case, executor, config_of(case, TWO), FCFS).tally
    finally:
        executor.close()
    assert tally.num_adapter_loads > 0
