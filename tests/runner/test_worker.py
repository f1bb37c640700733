"""Order of effect in a step, failures of one sequence, failures of a step."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.checks import assert_same_bits
from tests.runner.tiny import GREEDY, SPECS, VOCAB, Driver, engine_config, prompt_of, weights

from quire.errors import ModelLoadError
from quire.executor.local import LocalExecutor
from quire.request import Adapter, SamplingParams
from quire.step import AdapterMove, KvMove, NewSeq, SeqPlan, StepPlan


def driver(**options: bool) -> Driver:
    return Driver(engine_config(SPECS["llama"], **options))  # type: ignore[arg-type]


def test_moves_without_sequences() -> None:
    d = driver()
    storage = d.executor.worker.runner.kv.storage
    storage[3] = 1.5
    d.moves = [KvMove(3, 5), KvMove(5, 6)]
    result = d.step()
    assert (result.seqs, result.error) == ((), None)
    assert torch.equal(storage[6], storage[3])


def test_gone_then_admitted_again_in_one_plan() -> None:
    d = driver()
    d.add(1, prompt_of(20))
    first = d.generate(1, 3)
    d.drop(1)
    d.add(1, prompt_of(20), epoch=1)
    assert d.generate(1, 3) == first


def test_gone_of_a_sequence_that_never_came() -> None:
    d = driver()
    d._gone = [77]
    assert d.step().error is None


def test_a_chunk_gives_no_token() -> None:
    d = driver()
    d.add(1, prompt_of(20))
    (item,) = d.step((1, 19)).seqs
    assert (item.token_ids, item.logprobs, item.error) == ((), None, None)
    (item,) = d.step((1, 1)).seqs
    assert len(item.token_ids) == 1


def test_logprobs_come_with_the_token() -> None:
    d = driver()
    d.add(1, prompt_of(20), sampling=SamplingParams(temperature=0.0, seed=1, logprobs=3))
    (item,) = d.step((1, 20)).seqs
    assert item.logprobs is not None
    (entry,) = item.logprobs
    assert entry.token_id == item.token_ids[0]
    row = d.logits[1, 19].double().log_softmax(0)
    assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-5)
    assert list(entry.top_token_ids) == row.topk(3).indices.tolist()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (NewSeq(2, 0, (1, VOCAB), (), GREEDY, 0), f"0…{VOCAB - 1}"),
        (NewSeq(2, 0, (1, -1), (), GREEDY, 0), f"0…{VOCAB - 1}"),
        (NewSeq(2, 0, (1, 2), (), GREEDY, 0, adapter_slot=3), "adapter slot 3"),
        (NewSeq(2, 0, (1, 2), (), GREEDY, 0, grammar="root ::= x"), "grammar"),
    ],
)
def test_a_sequence_that_cannot_run_fails_alone(wrong: NewSeq, said: str) -> None:
    lone = driver()
    lone.add(1, prompt_of(20))
    lone.step((1, 20))
    d = driver()
    d.add(1, prompt_of(20))
    d.add(2, (1, 2))
    d._new[1] = wrong
    good, bad = d.step((1, 20), (2, 2)).seqs
    assert good.error is None
    assert said in (bad.error or "")
    assert_same_bits(d.logits[1, 19], lone.logits[1, 19], "the other sequence")
    d.drop(2)
    assert d.step((1, 1)).seqs[0].token_ids


def test_nan_fails_one_sequence_and_its_blocks_harm_nobody() -> None:
    d = driver()
    lone = driver()
    lone.add(3, prompt_of(40, 3))
    lone.step((3, 40))
    d.add(1, prompt_of(20))
    known = d.add(2, prompt_of(30, 2))
    d.step((1, 20), (2, 20))
    d.executor.worker.runner.kv.storage[known.blocks[0][0]] = float("nan")
    good, bad = d.step((1, 1), (2, 10)).seqs
    assert good.error is None
    assert "not finite" in (bad.error or "")
    assert bad.token_ids == ()
    blocks = list(known.blocks[0])
    d.executor.worker.runner.kv.storage[blocks[1]] = float("nan")  # what a broken model would have left
    d.drop(2)
    d.free = blocks + d.free
    d.add(3, prompt_of(40, 3))
    d.step((3, 40))
    assert_same_bits(d.logits[3, 39], lone.logits[3, 39], "the next owner of the blocks")


def test_a_failing_step_is_an_answer_and_the_next_one_works(caplog: pytest.LogCaptureFixture) -> None:
    d = driver()
    d.add(1, prompt_of(20))
    d.step((1, 20))
    d.executor.submit(StepPlan(9, seqs=(SeqPlan(1, 5, 20, 1),)))
    result = d.executor.collect()
    assert result.step == 9
    assert "StepError" in (result.error or "")
    assert "step 9 failed" in caplog.text
    d.executor.submit(StepPlan(10, adapter_moves=(AdapterMove(1, Adapter("x", "/x", "key", 8)),)))
    assert "adapters" in (d.executor.collect().error or "")
    assert d.step((1, 1)).seqs[0].token_ids


@pytest.mark.parametrize("plan", [SeqPlan(7, 0, 20, 1), SeqPlan(1, 3, 20, 1)])
def test_a_sequence_that_is_not_here_fails_the_step(plan: SeqPlan) -> None:
    d = driver()
    d.add(1, prompt_of(20))
    d.step((1, 20))
    d.executor.submit(StepPlan(9, seqs=(plan,)))
    said = f"sequence {plan.seq_id} in epoch {plan.epoch}; the worker does not have it"
    assert said in (d.executor.collect().error or "")
    assert d.step((1, 1)).seqs[0].token_ids


def test_one_step_at_a_time() -> None:
    d = driver()
    assert d.executor.max_in_flight == 1
    with pytest.raises(AssertionError, match="nothing was submitted"):
        d.executor.collect()
    d.executor.submit(StepPlan(0))
    with pytest.raises(AssertionError, match="one step at a time"):
        d.executor.submit(StepPlan(1))


def test_missing_weights_stop_the_build() -> None:
    config = engine_config(SPECS["llama"])
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight"):
        LocalExecutor(config, weights=weights(SPECS["llama"])[:-1])


def test_random_weights_through_the_loader() -> None:
    """`load_format="random"` needs no stream."""
    executor = LocalExecutor(engine_config(SPECS["latent"], "bfloat16"))
    executor.submit(
        StepPlan(0, (NewSeq(1, 0, (1, 2, 3), (), GREEDY, 0),), (SeqPlan(1, 0, 0, 3, (0,), ((0,),)),))
    )
    result = executor.collect()
    assert result.error is None
    assert result.seqs[0].token_ids
