"""Drafts through a whole worker: tokens, log-probabilities, logits and K/V are those of plain decoding, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.kernels.checks import runner_config
from tests.lora.peft_files import make_adapters
from tests.runner.tiny import GREEDY, SEED, SPECS, Driver, engine_config, prompt_of

from quire.config import EngineConfig, LoraConfig, SpeculateConfig
from quire.kernels.registry import backends
from quire.request import SamplingParams
from quire.sampling.draft_tree import Drafts, chain
from quire.speculate.proposer import Wanted
from quire.step import AdapterMove, SeqPlan, SeqResult, StepPlan

LEVELS = [level for level in ("reference", *backends("linear")) if level != "reference"][:1]
RANDOM = SamplingParams(temperature=0.9, seed=5, max_tokens=64)
PARAMS = (
    GREEDY,
    RANDOM,
    replace(RANDOM, seed=6, presence_penalty=0.8, repetition_penalty=1.4, logprobs=3),
    replace(RANDOM, seed=7, top_p=0.8, min_p=0.01, logit_bias={3: 4.0}, frequency_penalty=0.5),
    replace(GREEDY, bad_words_token_ids=((7,), (9, 9)), min_tokens=30, eos_token_ids=(2, 3)),
    replace(RANDOM, seed=8, typical_p=0.6, logprobs=0),
)
STEPS = 34


class Oracle(Driver):
    """Proposes the next tokens of plain decoding, each right with probability ``right``; None: no drafts."""

    def __init__(
        self, config: EngineConfig, right: float | None, truth: dict[int, list[int]], max_paths: int = 1
    ) -> None:
        super().__init__(config)
        self.max_paths = max_paths
        self.rows: dict[
            tuple[int, int], list[torch.Tensor]
        ] = {}  # of logits: in a tree several at a position
        self.rng = random.Random(SEED)
        self.right = right
        self.truth = truth
        self.held: dict[int, int] = {}
        self.results: dict[int, list[SeqResult]] = {}
        self.num_accepted = self.num_rejected = 0
        self.executor.worker.draft_with(self)

    def begin(self) -> None:
        """Nothing is remembered of a sequence."""

    def _observe(self, seq_id: int, position: int, row: torch.Tensor) -> None:
        super()._observe(seq_id, position, row)
        self.rows.setdefault((seq_id, position), []).append(row.clone())

    def propose(self, wanted: list[Wanted]) -> list[Drafts]:
        return [self._propose(each) for each in wanted]

    def _propose(self, wanted: Wanted) -> Drafts:
        seq_id, ids = wanted.seq_id, wanted.token_ids
        known = self.seqs[seq_id]
        assert ids[: len(known.prompt)].tolist() == list(known.prompt)
        rest = self.truth[seq_id][len(ids) - len(known.prompt) :][: wanted.limit]
        if self.max_paths == 1:
            return chain([self._maybe(token, 100) for token in rest])
        paths = []  # which leave the truth at any place, and may come back to it
        for path in range(self.max_paths):
            at = self.rng.randrange(len(rest) + 1) if rest else 0
            paths.append([*rest[:at], *(self._maybe(token, 100 + path) for token in rest[at:])])
        drafts = Drafts.from_paths(paths, wanted.limit)
        assert all(sampled >= 0 for sampled in wanted.sampled)
        return drafts

    def _maybe(self, token: int, other: int) -> int:
        return token if self.rng.random() < (self.right or 0) else other

    def _plan(self, seq_id: int, rows: int) -> SeqPlan:
        known = self.seqs[seq_id]
        known.computed = min(known.computed, len(known.prompt) + len(known.output) - 1)
        drafts = self.held.pop(seq_id, 0)
        plan = super()._plan(seq_id, rows + drafts)
        most = 0 if self.right is None else self.rng.randint(0, 4 if self.max_paths == 1 else 12)
        return plan._replace(num_draft_tokens=drafts, max_next_drafts=most)

    def _take(self, item: SeqResult) -> None:
        assert item.error is None
        self.results.setdefault(item.seq_id, []).append(item)
        if item.num_next_drafts:
            self.held[item.seq_id] = item.num_next_drafts
        super()._take(item)

    def run(self, samplings: Sequence[SamplingParams], adapters: Sequence[int] = ()) -> None:
        """Prompts in chunks beside decodes, which verify drafts, until every sequence has `STEPS` tokens."""
        for i, sampling in enumerate(samplings):
            self.add(i, prompt_of(11 + 7 * i, i), sampling=sampling)
            if adapters:
                self._new[-1] = replace(self._new[-1], adapter_slot=adapters[i], sample_index=i % 2)
        while going := [i for i, known in self.seqs.items() if len(known.output) < STEPS]:
            chunks = []
            for i in going:
                known = self.seqs[i]
                left = len(known.prompt) + len(known.output) - known.computed
                chunks.append((i, 1 if known.output else min(left, 13)))
                self.num_rejected += self.held.get(i, 0)
            result = self.step(*chunks)
            accepted = sum(max(0, len(item.token_ids) - 1) for item in result.seqs)
            self.num_accepted += accepted
            self.num_rejected -= accepted

    def kv(self, seq_id: int) -> list[torch.Tensor]:
        """K and V of the positions that plain decoding has computed as well, of each layer."""
        config, found = self.config, []
        count = len(self.seqs[seq_id].prompt) + STEPS - 1
        for index, view in enumerate(self.executor.worker.runner.kv.views):
            blocks = self.seqs[seq_id].blocks[config.kv_layout.group_of_layer(index)[0]]
            for part in view.read(torch.tensor(blocks)):
                found.append(part.transpose(1, 2).flatten(0, 1)[:count].clone())
        return found

    def tokens(self, seq_id: int) -> list[tuple[object, ...]]:
        found = []
        for item in self.results[seq_id]:
            entries = item.logprobs or (None,) * len(item.token_ids)
            found += zip(item.token_ids, entries, strict=True)
        return found[:STEPS]


def check(config: EngineConfig, samplings: Sequence[SamplingParams], right: float, adapters: Sequence[int] = (),
          moves: tuple[AdapterMove, ...] = (), max_paths: int = 1) -> Oracle:  # fmt: skip
    runs = []
    truth: dict[int, list[int]] = {}
    for share in (None, right):
        run = Oracle(config, share, truth, max_paths)
        if moves:
            run.executor.submit(StepPlan(0, adapter_moves=moves))
            assert run.executor.collect().error is None
        run.run(samplings, adapters)
        truth = {i: list(known.output) for i, known in run.seqs.items()}
        runs.append(run)
    plain, other = runs
    for i in range(len(samplings)):
        assert other.tokens(i) == plain.tokens(i), f"{samplings[i]}, seed {SEED}"
        for ours, expected in zip(other.kv(i), plain.kv(i), strict=True):
            assert torch.equal(ours, expected), f"K/V of {samplings[i]}, seed {SEED}"
    for key, row in plain.logits.items():
        if key[1] < len(plain.seqs[key[0]].prompt) + STEPS - 1:
            assert any(torch.equal(each, row) for each in other.rows[key]), f"logits at {key}, seed {SEED}"
    return other


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("name", SPECS)
def test_drafts_change_nothing(name: str, right: float) -> None:
    other = check(engine_config(SPECS[name]), PARAMS, right)
    assert (other.num_accepted > 40) == (right > 0.0)
    assert (other.num_rejected > 0) == (right < 1.0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafts_change_nothing_in_recorded_steps(dtype: str, level: str) -> None:
    """Few sequences fit the recorded step with their drafts; many need one of their own."""
    for samplings in (PARAMS[1:3], PARAMS):
        config = engine_config(SPECS["llama"], dtype, isa=level)
        other = check(replace(config, runner=runner_config(level, num_threads=2)), samplings, 0.7)
        assert other.executor.worker.runner.tape is not None
        assert other.num_accepted > 20


def test_drafts_change_nothing_under_adapters(tmp_path: Path) -> None:
    """Two adapters and the base model in one step, and several samples of one seed."""
    adapters = make_adapters(tmp_path, SPECS["llama"])[:2]
    config = engine_config(SPECS["llama"])
    config = replace(
        config,
        scheduler=replace(config.scheduler, max_loras=2),
        lora=LoraConfig(2, max(adapter.rank for adapter in adapters)),
    )
    moves = tuple(AdapterMove(slot + 1, adapter) for slot, adapter in enumerate(adapters))
    samplings = (RANDOM, RANDOM, RANDOM, RANDOM, GREEDY, GREEDY)
    other = check(config, samplings, 0.7, adapters=(1, 1, 0, 0, 2, 1), moves=moves)
    assert other.num_accepted > 20


def with_branches(config: EngineConfig, num_blocks: int = 400) -> EngineConfig:
    return replace(config, speculate=SpeculateConfig("ngram", num_branch_blocks=num_blocks))


@pytest.mark.parametrize("right", [0.3, 0.8])
@pytest.mark.parametrize("name", SPECS)
def test_trees_change_nothing(name: str, right: float) -> None:
    other = check(with_branches(engine_config(SPECS[name])), PARAMS, right, max_paths=4)
    assert other.num_accepted > 60
    assert other.num_rejected > 10


@pytest.mark.parametrize("level", LEVELS)
def test_trees_change_nothing_in_recorded_steps(level: str) -> None:
    """The step is recorded; K and V lie in tiles."""
    config = with_branches(engine_config(SPECS["llama"], "bfloat16", isa=level))
    config = replace(config, scheduler=replace(config.scheduler, max_num_drafts=12))
    other = check(replace(config, runner=runner_config(level, num_threads=2)), PARAMS, 0.7, max_paths=4)
    assert other.executor.worker.runner.tape is not None
    assert other.num_accepted > 60


def test_without_blocks_a_tree_is_its_trunk() -> None:
    other = check(with_branches(engine_config(SPECS["llama"]), 3), PARAMS, 0.7, max_paths=4)
    assert other.num_accepted > 40


def test_drafts_that_are_not_there_fail_the_step() -> None:
    driver = Driver(engine_config(SPECS["llama"]))
    driver.add(0, prompt_of(5))
    driver.step((0, 5))
    driver.executor.submit(StepPlan(9, seqs=(SeqPlan(0, 0, 5, 3, num_draft_tokens=2, max_next_drafts=4),)))
    assert "the plan verifies 2 drafts" in str(driver.executor.collect().error)
