"""Heads that draft, over ranks: the first rank of the last stage has them, and its drafts are those of one process."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.exact.engine_run import Drafting, EngineRun, Policy
from tests.exact.models import MODELS, head_spec
from tests.exact.suite import Case, truth_of
from tests.parallel.ranks import Helpers, RankedExecutor
from tests.parallel.serving import alone_on, config_of, serve

from quire.args import EngineArgs
from quire.config import DeviceInfo, HeadsConfig
from quire.cost.ranks import RankBytes
from quire.cost.speculation import HeadCheckpoint
from quire.errors import ConfigError
from quire.executor.base import Executor
from quire.executor.local import LocalExecutor
from quire.executor.ranks import RanksExecutor
from quire.families.head_spec import HeadMethod
from quire.kernels.registry import NATIVE_LEVELS, backends
from quire.models import loader
from quire.modelspec import matrix_bytes, weight_shapes
from quire.parallel.topology import Topology
from quire.resolve import resolve
from quire.speculate.proposer import Wanted
from quire.weight_format import PLAIN

NATIVE = next((level for level in NATIVE_LEVELS if level in backends("linear")), "reference")
ROWS, SUMS, STAGES = Topology(ep=2), Topology(tp=2), Topology(pp=2)
FEW = Case("llama", "bfloat16", 52, 8, NATIVE, max_prompt=60, max_output=8)
ALONE = Policy("continuous", "fcfs", 320)
MACHINE = DeviceInfo("cpu", "test", 2, 2**33, 2**33)


@pytest.fixture
def _wide_weights(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loader, "STD", 0.3)
    truth_of.cache_clear()
    yield
    truth_of.cache_clear()


def policy_of(drafts: Drafting) -> Policy:
    return Policy("continuous", "fcfs", 48, drafts)


Proposal = tuple[tuple[int, ...], tuple[int, ...]]  # known tokens, and drafts behind them


def proposals(case: Case, executor: Executor, topology: Topology, drafts: Drafting) -> list[Proposal]:
    """Serve the case's traffic, compare its tokens with those of one process, and return all drafts."""
    proposer, seen = executor.worker.drafting.proposer, []  # type: ignore[attr-defined]
    real = proposer.propose

    def propose(wanted: list[Wanted]) -> object:
        found = real(wanted)
        for each, of_seq in zip(wanted, found, strict=True):
            seen.append((tuple(np.asarray(each.token_ids).tolist()), of_seq.token_ids))
        return found

    proposer.propose = propose
    try:
        serve(case, executor, config_of(case, topology, policy_of(drafts)), policy_of(drafts))
    finally:
        executor.close()
    return seen


@pytest.mark.usefixtures("_wide_weights")
@pytest.mark.parametrize(
    ("case", "drafts"),
    [
        pytest.param(Case("llama", "bfloat16", 54, 12, NATIVE, quantize="int8"), "eagle", id="eagle-int8"),
        *(
            pytest.param(case, drafts, id=name, marks=pytest.mark.slow)
            for case, drafts, name in (
                (Case("post_norm", "bfloat16", 47, 12, NATIVE), "eagle", "eagle-tied-and-scaled"),
                (Case("llama", "bfloat16", 55, 12, NATIVE), "eagle3", "eagle3"),
                (Case("sliding", "float32", 47, 12), "medusa", "medusa"),
                (Case("latent", "bfloat16", 47, 12, NATIVE), "mtp", "mtp"),
            )
        ),
    ],
)
def test_ranks_draft_what_one_process_drafts(case: Case, drafts: Drafting, helpers: Helpers) -> None:
    policy = policy_of(drafts)
    one = proposals(case, LocalExecutor(config_of(case, Topology(), policy)), Topology(), drafts)
    ranked = RankedExecutor(config_of(case, ROWS, policy), ROWS, helpers, 0.3)
    assert proposals(case, ranked, ROWS, drafts) == one
    assert sum(map(len, (of_seq for _, of_seq in one))) > 100


@pytest.mark.parametrize(
    ("case", "drafts", "topology"),
    [
        pytest.param(FEW, "eagle", ROWS, id="eagle-rows"),
        pytest.param(FEW, "eagle3", STAGES, id="eagle3-stages", marks=pytest.mark.slow),
        *(
            pytest.param(Case(model, dtype, 52, 16, isa), drafts, topology, id=name, marks=pytest.mark.slow)
            for model, dtype, isa, drafts, topology, name in (
                ("llama", "bfloat16", NATIVE, "eagle", SUMS, "eagle-sums"),
                ("llama", "float32", "reference", "eagle", STAGES, "eagle-stages"),
                ("sliding", "bfloat16", NATIVE, "eagle3", SUMS, "eagle3-sums"),
                ("moe", "bfloat16", NATIVE, "eagle", ROWS, "eagle-experts"),
                ("llama", "bfloat16", NATIVE, "medusa", SUMS, "medusa-sums"),
                ("post_norm", "bfloat16", NATIVE, "medusa", STAGES, "medusa-stages-tied"),
                ("latent", "bfloat16", NATIVE, "mtp", SUMS, "mtp-sums"),
                ("latent", "bfloat16", NATIVE, "mtp", STAGES, "mtp-stages"),
                ("llama", "bfloat16", NATIVE, "eagle3", Topology(tp=2, pp=2), "eagle3-sums-stages"),
            )
        ),
    ],
)
def test_processes_of_ranks_are_exact_with_heads(case: Case, drafts: Drafting, topology: Topology) -> None:
    """Tokens are those of every sequence alone, which a draft never changes; other ranks of the stage keep step."""
    config = config_of(case, topology, policy_of(drafts))
    executor = RanksExecutor(config)
    try:
        if topology.tp > 1:
            truth = alone_on(case, executor, config_of(case, topology, ALONE))
        else:
            truth = truth_of(case)
        run: EngineRun = serve(case, executor, config, policy_of(drafts), truth)
    finally:
        executor.close()
    if topology.pp == 1:  # with more in flight, drafts are not counted
        assert run.tally.num_accepted + run.tally.num_rejected > 5


@pytest.mark.parametrize(
    ("topology", "drafts", "names"),
    [
        (ROWS, "eagle", ("embed.weight", "lm_head.weight")),
        (SUMS, "eagle3", ("embed.weight",)),
        (SUMS, "medusa", ("lm_head.weight",)),
        (STAGES, "eagle", ("embed.weight",)),
        (STAGES, "medusa", ()),
        (Topology(), "eagle", ()),
    ],
)
def test_the_rank_that_drafts_counts_its_copies(
    topology: Topology, drafts: HeadMethod, names: tuple[str, ...]
) -> None:
    """It reads whole what it has but a part of, or what another stage has."""
    spec = MODELS["llama"]()
    heads = HeadsConfig("", "heads", head_spec(spec, drafts), "float32", "random")
    held = RankBytes(spec, topology, {}, "float32", "float32", 16)
    shapes = weight_shapes(spec)
    assert held.copies(heads) == sum(matrix_bytes(shapes[name], "float32", PLAIN) for name in names)


def test_heads_are_refused_where_positions_are_cut() -> None:
    spec = MODELS["llama"]()
    heads = HeadCheckpoint("heads", "heads", head_spec(spec, "medusa"), "random")
    with pytest.raises(ConfigError, match="context_parallel_size"):
        resolve(EngineArgs(context_parallel_size=2), spec, MACHINE, draft=heads)
