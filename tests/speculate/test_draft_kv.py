"""The draft model's K and V where it trusts them: those of the target, bit for bit, where a model drafts for itself."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from tests.exact.engine_run import EngineRun, Policy, Tally
from tests.exact.suite import Case
from tests.exact.traffic import make_jobs

from quire.executor.local import LocalExecutor
from quire.models import loader
from quire.runner.draft_model import DraftModel
from quire.runner.input_batch import PreparedStep
from quire.sampling.draft_tree import NO_DRAFTS, Drafts
from quire.speculate.draft import DraftProposer
from quire.speculate.proposer import Wanted

CASE, POLICY, SEEDS = (
    Case("llama", "float32", 0, num_requests=20),
    Policy("continuous", "fcfs", 48, "self"),
    (0, 2, 3),  # in each of them a block is replaced that the draft model has filled
)


def test_trusted_keys_are_those_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most drafts are wrong, and a sequence has none in some steps; prefix hits and preemptions pass blocks on.

    Every request has a twin that samples the same tokens beside it and mostly has no drafts: where both fill a block,
    one takes the other's, which the draft model has not filled.
    """
    monkeypatch.setattr(loader, "STD", 0.3)
    tally, seen, wrong = Tally(), Counter[str](), []
    sample, propose, num_computed = DraftModel._sample, DraftProposer.propose, DraftModel.num_computed

    def sample_badly(self: DraftModel, step: PreparedStep) -> list[int]:
        vocab = CASE.spec.vocab_size
        return [rng.randrange(vocab) if rng.random() < 0.7 else each for each in sample(self, step)]

    def propose_for_some(self: DraftProposer, wanted: list[Wanted]) -> list[Drafts]:
        asked = [each for each in wanted if each.seq_id % 2 or rng.random() < 0.1]
        found = dict(zip((each.seq_id for each in asked), propose(self, asked), strict=True))
        return [found.get(each.seq_id, NO_DRAFTS) for each in wanted]

    def check(self: DraftModel, seq_id: int, num_known: int, num_agreed: int) -> int:
        count = num_computed(self, seq_id, num_known, num_agreed)
        seq = self._seq(seq_id)
        blocks = torch.from_numpy(self._blocks(seq, count).astype("int64"))
        for ours, theirs in zip(self.runner.kv.views, target.views, strict=True):
            for mine, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                found, expected = (x[blocks].transpose(1, 2).flatten(0, 1)[:count] for x in (mine, other))
                if not torch.equal(found, expected):  # an exception would only end drafting
                    wrong.append((seed, seq_id, count))
        seen["trusted"] += count
        seen["behind"] += (
            seq.drafting.num_filled < num_known and self._leading(self.written, seq, num_agreed) > count
        )
        return count

    monkeypatch.setattr(DraftModel, "_sample", sample_badly)
    monkeypatch.setattr(DraftModel, "num_computed", check)
    monkeypatch.setattr(DraftProposer, "propose", propose_for_some)
    for seed in SEEDS:
        rng, config = random.Random(seed), CASE.config(20, POLICY)
        executor = LocalExecutor(config)
        target = executor.worker.runner.kv
        jobs = make_jobs(seed, CASE.num_requests, CASE.spec.vocab_size, (), max_prompt=80, max_output=48)
        twins = [
            replace(job, request=replace(job.request, request_id=f"{job.request.request_id}t"))
            for job in jobs
        ]
        run = EngineRun(config, executor, POLICY)
        run.serve([*jobs, *twins])
        tally += run.tally
        assert executor.worker.drafting.proposer is not None, "proposing failed"
        executor.close()
    print(dict(seen), tally)
    assert not wrong, f"K or V of other tokens are trusted (seed, sequence, count): {wrong[:5]}"
    assert seen["trusted"] > 1000
    assert seen["behind"] > 0, "nowhere did K and V of drafts lie behind missing tokens"
    assert tally.num_preemptions > 0
    assert tally.num_rejected > 50
