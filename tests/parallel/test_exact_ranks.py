"""Exactness over ranks: within a tensor-parallel size, tokens are those of every sequence by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine.test_process import gone
from tests.exact.engine_run import Policy
from tests.exact.models import KNOWN_MODELS, MODELS
from tests.exact.suite import Case, Truth, truth_of
from tests.lora.peft_files import make_adapters, make_end_adapters
from tests.parallel.ranks import Helpers, RankedExecutor
from tests.parallel.serving import FCFS, QUILL, alone_on, config_of, serve

from quire.config import ExpertsConfig
from quire.errors import ConfigError
from quire.executor.ranks import RanksExecutor
from quire.kernels.registry import NATIVE_LEVELS, backends
from quire.parallel.shard import shard
from quire.parallel.topology import Topology

# One sequence at a time leaves the stages of a pipeline idle, which its bits must not depend on.
ALONE = Policy("continuous", "fcfs", 320)
CASE = Case(QUILL, "bfloat16", 71, num_requests=8, cpu_isa="reference", max_prompt=60, max_output=8)
SPLIT = Topology(tp=2)
LEVEL = next((level for level in NATIVE_LEVELS[::-1] if level in backends("linear")), "reference")
NATIVE = next((level for level in NATIVE_LEVELS if level in backends("linear")), "reference")


@pytest.fixture(scope="module")
def two() -> Iterator[RanksExecutor]:
    executor = RanksExecutor(config_of(CASE, SPLIT))
    assert not list(Path("/dev/shm").glob(f"quire-{executor.pids[0]}-*"))
    yield executor
    pids = executor.pids
    executor.close()
    assert all(map(gone, pids))


@pytest.fixture(scope="module")
def truth(two: RanksExecutor) -> Truth:
    return alone_on(CASE, two, config_of(CASE, SPLIT, ALONE))


@pytest.mark.parametrize("policy", [FCFS])
def test_two_tensor_parallel_ranks_are_exact(two: RanksExecutor, truth: Truth, policy: Policy) -> None:
    tally = serve(CASE, two, config_of(CASE, SPLIT), policy, truth).tally
    assert tally.num_chunked_prompts > 0


@pytest.mark.parametrize(
    "topology",
    [Topology(ep=2, redundant_experts=2), Topology(ep=2, pp=2)],
    ids=str,
)
@pytest.mark.slow
def test_experts_over_ranks_give_the_tokens_of_one_process(topology: Topology) -> None:
    """The processes of the ranks move experts between steps; what they report reaches the engine."""
    case = Case("moe", "bfloat16", 71, num_requests=8, cpu_isa=NATIVE, max_prompt=60, max_output=8)
    config = replace(config_of(case, topology), experts=ExpertsConfig(True, 2))
    executor = RanksExecutor(config)
    try:
        tally = serve(case, executor, config, FCFS).tally
        stats = executor.rank_stats()
    finally:
        executor.close()
    assert tally.num_chunked_prompts > 0
    assert [load.layer for load in stats.experts] == [0, 1]
    assert stats.num_moved > 0


STRIPES = Topology(cp=2)


@pytest.mark.parametrize(
    ("model", "drafts"),
    [
        ("latent", "ngram"),
        *(
            pytest.param(model, "self", marks=pytest.mark.slow)
            for model in ("llama", "sliding", "moe", "latent")
        ),
    ],
)
def test_two_context_parallel_ranks_are_exact(model: str, drafts: str) -> None:
    """Processes as the engine starts them; drafts, branches and forks have blocks on both ranks."""
    case = Case(model, "float32", 52, num_requests=16)
    policy = Policy("continuous", "fcfs", 64, drafts)  # type: ignore[arg-type]
    config = config_of(case, STRIPES, policy)
    executor = RanksExecutor(config)
    try:
        truth = alone_on(case, executor, config_of(case, STRIPES, ALONE))
        tally = serve(case, executor, config, policy, truth).tally
    finally:
        executor.close()
    assert tally.num_chunked_prompts > 0
    assert tally.num_moves > 0


@pytest.mark.parametrize(
    "model",
    [
        "per_layer",
        "beside_experts",
        "hybrid",
        "channel_decays",
        "side_by_side",
        "convolutions",
        "mamba",
        "parallel",
        "blocks",
    ],
)
def test_two_ranks_share_layers_of_two_kinds(model: str, helpers: Helpers) -> None:
    """Gemma 4: each rank has a head of the local layers, both the one of the global ones and all embeddings. Qwen3.5:
    each has heads of the attention and of the states; its ranks are processes as an engine starts them."""
    case = Case(model, "float32", 52, num_requests=12)
    config = config_of(case, SPLIT, FCFS)
    executor = RanksExecutor(config) if model == "hybrid" else RankedExecutor(config, SPLIT, helpers)
    try:
        serve(case, executor, config, FCFS, alone_on(case, executor, config_of(case, SPLIT, ALONE)))
    finally:
        executor.close()


@pytest.mark.parametrize("topology", [Topology(pp=2), Topology(cp=2)], ids=str)
def test_layers_that_read_more_than_rows_are_on_one_rank(topology: Topology) -> None:
    with pytest.raises(ConfigError, match="parallel_size = 2: layers of Gemma4ForCausalLM read more"):
        shard(KNOWN_MODELS["per_layer"](), topology, 0)


@pytest.mark.slow
@pytest.mark.parametrize("more", [Topology(cp=2, pp=2), Topology(cp=2, ep=2)], ids=str)
def test_stages_and_experts_over_stripes_give_the_bits_of_stripes(more: Topology) -> None:
    case = Case("moe", "bfloat16", 52, num_requests=16, cpu_isa=NATIVE)
    found = []
    for topology in (STRIPES, more):
        config = config_of(case, topology)
        executor = RanksExecutor(config)
        try:
            truth = alone_on(case, executor, config_of(case, topology, ALONE))
            serve(case, executor, config, FCFS, truth)
            found.append(truth.outputs)
        finally:
            executor.close()
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 2])
def test_stages_of_two_ranks_give_the_bits_of_two_ranks(truth: Truth, num_threads: int) -> None:
    config = config_of(CASE, Topology(tp=2, pp=2), num_threads=num_threads)
    executor = RanksExecutor(config)
    try:
        serve(CASE, executor, config, FCFS, truth)
    finally:
        executor.close()


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["ngram", "self"])
@pytest.mark.parametrize("model", ["llama", "sliding", "moe", "latent"])
def test_every_family_is_exact_over_two_ranks(model: str, drafts: str) -> None:
    case = Case(model, "float32", 52, num_requests=24)
    policy = Policy("continuous", "fcfs", 48, drafts)  # type: ignore[arg-type]
    config = config_of(case, SPLIT, policy)
    executor = RanksExecutor(config)
    try:
        serve(case, executor, config, policy, alone_on(case, executor, config_of(case, SPLIT, ALONE)))
    finally:
        executor.close()


@pytest.mark.parametrize(
    "topology",
    [
        SPLIT,
        pytest.param(Topology(tp=2, pp=2), marks=pytest.mark.slow),
        pytest.param(Topology(pp=2), marks=pytest.mark.slow),
        pytest.param(Topology(cp=2), marks=pytest.mark.slow),
        pytest.param(Topology(ep=2), marks=pytest.mark.slow),
        pytest.param(Topology(ep=2, cp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_adapters_are_exact_over_ranks(topology: Topology, helpers: Helpers, tmp_path: Path) -> None:
    """Five adapters and the base model over two slots; two of them change the ends of the model."""
    spec = MODELS["llama"]()
    adapters = (*make_adapters(tmp_path, spec), *make_end_adapters(tmp_path, spec)[:2])
    case = Case("llama", "bfloat16", 31, num_requests=12, cpu_isa=LEVEL, adapters=adapters)
    config = config_of(case, topology)
    executor = RankedExecutor(config, SPLIT, helpers) if topology == SPLIT else RanksExecutor(config)
    try:
        truth = alone_on(case, executor, config_of(case, topology, ALONE))
        tally = serve(case, executor, config, FCFS, truth).tally
        if topology.tp * topology.cp == 1:
            assert truth.outputs == truth_of(case).outputs
    finally:
        executor.close()
    assert tally.num_adapter_loads > 0
