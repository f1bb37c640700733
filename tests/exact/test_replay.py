"""A recording, whole or from the middle of a run, replays to the same results; a planted difference is found."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest
from tests.exact.engine_run import EngineRun, Policy
from tests.exact.models import EOS, VOCAB
from tests.exact.suite import Case
from tests.exact.traffic import make_jobs

from quire.clock import VirtualClock
from quire.config import EngineConfig
from quire.engine.replay import Outcome, Replay, num_blocks
from quire.executor.local import LocalExecutor
from quire.executor.recorder import Recorder, Recording, RecordingExecutor
from quire.models import loader

EVERYTHING = 10**6


@pytest.fixture(autouse=True)
def _wide_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "STD", 0.3)


def record(case: Case, policy: Policy) -> tuple[Recording, EngineConfig, EngineRun]:
    """Serve traffic with n, seeds, penalties, log-probabilities, prefixes and preemptions; return what is recorded."""
    config = case.config(20 if case.model == "llama" else 32, policy)
    executor = LocalExecutor(config)
    recorder = Recorder(EVERYTHING)
    run = EngineRun(config, RecordingExecutor(executor, recorder, VirtualClock()), policy)
    run.serve(make_jobs(case.seed, case.num_requests, VOCAB, (EOS,), max_prompt=80, max_output=14))
    return recorder.take({}, "{}", with_ids=True), config, run


def replayed(recording: Recording, config: EngineConfig) -> Outcome:
    # As from a file.
    recording = msgspec.msgpack.decode(msgspec.msgpack.encode(recording), type=Recording)
    blocks = num_blocks(recording, len(config.cache.windows))
    config = replace(config, speculate=None, cache=replace(config.cache, num_blocks=blocks))
    executor = LocalExecutor(config)
    return Replay(
        recording, executor, executor.worker.seqs, block_size=config.cache.block_size, windows=config.cache.windows,
        max_num_batched_tokens=32, vocab_size=VOCAB, same_bits=True,
    ).run()  # fmt: skip


def last_steps(recording: Recording, begin: int, end: int) -> Recording:
    """Return what a recorder with room for ``end`` − ``begin`` steps has after ``end`` of them."""
    recorder = Recorder(end - begin)
    for step in recording.steps[:end]:
        assert step.result is not None
        recorder.submitted(step.plan, 0.0)
        recorder.collected(step.result, 0.0)
    return recorder.take({}, "{}", with_ids=True)


WHOLE = [("llama", "ngram"), ("sliding", "none")]
MORE = [("llama", "none"), ("llama", "self"), ("sliding", "ngram"), ("sliding", "self")]


@pytest.mark.parametrize(
    ("model", "drafts"), [*WHOLE, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)]
)
def test_recordings_replay_whole_and_from_mid_life(model: str, drafts: str) -> None:
    case = Case(model, "float32", 46 if model == "llama" else 47, num_requests=16)
    whole, config, run = record(case, Policy("continuous", "fcfs", 48, drafts))  # type: ignore[arg-type]
    found = replayed(whole, config)
    assert found.difference is None
    assert found.num_steps == run.tally.num_steps == len(whole.steps)
    assert found.num_rebuilt == 0
    assert run.tally.num_preemptions > 0 or drafts != "none"
    assert run.tally.num_forks > 0
    rebuilt = 0
    for begin in range(3, len(whole.steps) - 2, 9):
        part = last_steps(whole, begin, min(begin + 12, len(whole.steps)))
        found = replayed(part, config)
        assert found.difference is None, (begin, str(found.difference))
        assert found.num_steps == len(part.steps)
        rebuilt += found.num_rebuilt
    assert rebuilt > 0


def test_a_planted_difference_is_found_at_its_step() -> None:
    case = Case("llama", "float32", 46, num_requests=16)
    whole, config, _ = record(case, Policy("continuous", "fcfs", 48))
    recording = last_steps(whole, 10, len(whole.steps))
    rng = random.Random(1)
    places = [i for i, step in enumerate(recording.steps) if any(seq.token_ids for seq in step.result.seqs)]  # type: ignore[union-attr]
    for place in rng.sample(places, 3):
        step = recording.steps[place]
        assert step.result is not None
        seqs = list(step.result.seqs)
        index = next(i for i, seq in enumerate(seqs) if seq.token_ids)
        wrong = (seqs[index].token_ids[0] + 1) % VOCAB
        seqs[index] = seqs[index]._replace(token_ids=(wrong, *seqs[index].token_ids[1:]))
        steps = list(recording.steps)
        steps[place] = step._replace(result=replace(step.result, seqs=tuple(seqs)))
        found = replayed(replace(recording, steps=steps), config).difference
        assert found is not None
        plan = step.plan.seqs[index]
        position = plan.num_computed_tokens + plan.num_scheduled_tokens
        assert (found.step, found.seq_id, found.position) == (step.plan.step, seqs[index].seq_id, position)
        assert f"expected token {wrong}" in found.text
