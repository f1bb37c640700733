"""What heads keep in blocks, through preemptions, forks, prefix hits and chunks: it is what a fresh worker computes."""

from __future__ import annotations

import pytest
import torch
from tests.exact.engine_run import Policy
from tests.exact.suite import Case, serve_and_check

from quire.clock import VirtualClock
from quire.config import EngineConfig
from quire.models import loader
from quire.models.loader import iter_weights
from quire.request import Sampling
from quire.runner.draft_model import DraftModel
from quire.runner.heads import HeadRunner
from quire.runner.worker import Worker
from quire.sampling.draft_tree import Drafts
from quire.speculate.draft import DraftProposer
from quire.speculate.proposer import Wanted
from quire.step import NewSeq, SeqPlan, StepPlan


class Fresh:
    """A worker that computes one sequence at a time, whole, in blocks of its own."""

    def __init__(self, config: EngineConfig) -> None:
        weights = iter_weights(config.model, getattr(torch, config.model.dtype))
        self.worker = Worker(config, weights, VirtualClock())
        self._groups, self._size = len(config.kv_layout.groups), config.cache.block_size
        self._count = 0

    def hidden(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        """What heads may read of each token: ``[num_tokens, size]``."""
        count = -(-len(token_ids) // self._size)
        blocks = tuple(tuple(range(g * count, (g + 1) * count)) for g in range(self._groups))
        self._count += 1
        plan = StepPlan(
            self._count,
            gone=(self._count - 1,),
            new_seqs=(
                NewSeq(self._count, 0, token_ids, (), Sampling(temperature=0.0, seed=1, max_tokens=0), 0),
            ),
            seqs=(SeqPlan(self._count, 0, 0, len(token_ids), (0,) * self._groups, blocks),),
        )
        assert self.worker.execute(plan).seqs[0].error is None
        return rows_of(self.worker.drafting.model, self._count, len(token_ids))


def rows_of(model: DraftModel | None, seq_id: int, count: int) -> torch.Tensor:
    assert model is not None
    assert isinstance(model.runner, HeadRunner)
    seq, size = model.worker_seqs.find(seq_id), model.block_size
    positions = torch.arange(count)
    table = torch.from_numpy(model.worker_seqs.block_tables[model.group][seq.row].astype("int64"))
    return model.runner.hidden.rows[table[positions // size] * size + positions % size]


@pytest.mark.parametrize(
    ("model", "drafts"),
    [
        ("llama", "eagle"),
        ("sliding", "eagle3"),
        ("latent", "mtp"),
        pytest.param("post_norm", "eagle3", marks=pytest.mark.slow),
    ],
)
def test_heads_read_what_a_fresh_worker_computes(
    model: str, drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "STD", 0.3)
    case, policy = Case(model, "float32", 47, num_requests=16), Policy("continuous", "fcfs", 48, drafts)  # type: ignore[arg-type]
    fresh = Fresh(case.config(100, policy))
    real, seen = DraftProposer.propose, {"checked": 0, "again": 0, "other": 0, "calls": 0}

    def propose(self: DraftProposer, wanted: list[Wanted]) -> list[Drafts]:
        found = real(self, wanted)
        seen["calls"] += 1
        if seen["calls"] % 3:
            return found
        draft_model = self._model
        assert isinstance(draft_model, DraftModel)
        for each in wanted:
            ids = tuple(each.token_ids.tolist())
            alone = fresh.hidden(ids)[: len(ids) - 1]
            assert torch.equal(rows_of(draft_model, each.seq_id, len(ids) - 1), alone), (
                "another hidden state is read"
            )
            seen["checked"] += 1
        # Drafts with keys and values that were all computed anew.
        draft_model.filled[:] = draft_model.written[:] = 0
        again = real(self, wanted)
        seen["again"] += len(found)
        seen["other"] += sum(
            a.first(min(len(a), len(b))) != b.first(min(len(a), len(b)))
            for a, b in zip(found, again, strict=True)
        )
        return found

    monkeypatch.setattr(DraftProposer, "propose", propose)
    tally = serve_and_check(case, policy).tally
    assert tally.num_preemptions > 0
    assert tally.num_forks > 0
    assert tally.num_cached_tokens > 0
    assert seen["checked"] > 20, seen
    assert seen["other"] <= 0.05 * seen["again"], seen
