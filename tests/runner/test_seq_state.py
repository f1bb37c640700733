"""What a worker keeps of sequences beyond their tokens: nothing of a plain one, and of others what they ask for."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from tests.sampling.harness import worker_seqs
from tests.sampling.oracle import random_params

from quire.request import Pooling, Sampling, SamplingParams, ThinkingBudget
from quire.sampling.processors import LogitsProcessors
from quire.sampling.seq_state import STATES, wanted
from quire.step import NewSeq

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 300
PLAIN = NewSeq(1, 0, (3, 4), (), SamplingParams(temperature=0.7, seed=1, top_k=5, top_p=0.9, min_p=0.1), 0)
# One value of each field of `Sampling` that changes logits.
CHANGES = {
    "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2, "logit_bias": {3: 1.0},
    "min_tokens": 2, "typical_p": 0.5, "allowed_token_ids": (3, 4), "bad_words_token_ids": ((5,),),
    "thinking_budget": ThinkingBudget(1, 8, 9),
}  # fmt: skip
LOADED = """
import sys
from quire import LLM, SamplingParams
LLM("quill").generate(["It was"], SamplingParams(max_tokens=3))
print(*(name for name in sys.argv[1:] if name in sys.modules))
"""


def test_plain_sequence_has_no_state() -> None:
    seq = worker_seqs(VOCAB).admit(PLAIN)
    assert not seq.states
    assert seq.num_logits == 1


@pytest.mark.parametrize("name", CHANGES)
def test_each_field_that_changes_logits_has_a_state(name: str) -> None:
    new = replace(PLAIN, sampling=replace(PLAIN.sampling, **{name: CHANGES[name]}))
    assert not new.is_plain
    assert worker_seqs(VOCAB).admit(new).processors is not None


def test_sequence_taken_for_plain_needs_no_processor() -> None:
    rng = random.Random(7)
    for _ in range(500):
        new = replace(PLAIN, sampling=random_params(rng))
        assert not new.is_plain or not LogitsProcessors(new, VOCAB)


def test_every_state_is_wanted_by_some_sequence() -> None:
    others = [
        replace(PLAIN, pooling=Pooling("last")),
        replace(PLAIN, prompt_logprobs=0),
        replace(PLAIN, grammar="x"),
        replace(PLAIN, sampling=replace(PLAIN.sampling, min_tokens=1)),
    ]
    assert {name for new in others for name in wanted(new, samples=True)} == set(STATES)
    assert not any(new.is_plain for new in [*others, replace(PLAIN, adapter_slot=1)])
    assert not wanted(replace(others[2], sampling=others[3].sampling), samples=False)


def test_no_field_of_sampling_is_forgotten() -> None:
    """A new field either changes logits, and then has a state, or is named here."""
    others = {
        "n", "best_of", "temperature", "top_p", "top_k", "min_p", "repeat_last_n", "seed", "max_tokens", "stop",
        "stop_token_ids", "include_stop_str_in_output", "logprobs", "prompt_logprobs", "skip_special_tokens",
        "use_beam_search", "length_penalty", "early_stopping", "eos_token_ids",
    }  # fmt: skip
    assert {field.name for field in fields(Sampling)} == others | set(CHANGES)


def test_adapter_that_a_worker_cannot_run_is_refused() -> None:
    seq = worker_seqs(VOCAB).admit(replace(PLAIN, adapter_slot=2))
    assert seq.refusal is not None
    assert "adapter slot 2" in seq.refusal


def test_plain_request_loads_no_state() -> None:
    modules = (
        *STATES.values(), "quire.sampling.seq_state", "quire.runner.verify", "quire.runner.draft_state",
        "quire.runner.drafting", "quire.text.constraint",
    )  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *modules],
        env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.split("\n")[-2].split() == []
