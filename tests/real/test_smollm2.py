"""SmolLM2-135M-Instruct, a model that people use: it answers, exactly, and stays near its own numbers in fp32."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.args import EngineArgs
from quire.clock import WallClock
from quire.device import detect_device
from quire_lab.eval.args import EvalArgs
from quire_lab.eval.run import evaluate

pytestmark = [pytest.mark.real, pytest.mark.component]

# The first one's best tokens lead by 2 nats and more, so that no rounding changes its answer.
QUESTIONS = [
    "Complete the sentence: The capital of France is",
    "What is the largest planet?",
    "How many days does a week have?",
    "What is gravity? Answer briefly.",
]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "scope.md"


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    made = LLM(str(smollm2), threads=1, max_model_len=1024, max_num_seqs=8)
    yield made
    made.close()


def chats(questions: list[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": question}] for question in questions]


def test_answers_end_with_their_turn(llm: LLM) -> None:
    """Text that goes on, or that has marks in it, means that the template or an end was read wrongly."""
    answers = [
        out.outputs[0] for out in llm.chat(chats(QUESTIONS), SamplingParams(temperature=0.0, max_tokens=200))
    ]
    assert "Paris" in answers[0].text
    assert answers[0].finish_reason == "stop"
    # A model of this size may go round in circles once.
    assert [answer.finish_reason for answer in answers].count("stop") >= len(answers) - 1
    for answer in answers:
        assert not re.search(r"<\|?[a-z_]+\|?>", answer.text), "special tokens are not text"
        assert answer.text.strip()
        assert answer.text.isascii() or all(c.isprintable() or c.isspace() for c in answer.text)


def test_an_answer_alone_is_that_of_a_batch(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0.2, top_p=0.9, seed=seed, max_tokens=40, logprobs=2)
        for seed in range(len(QUESTIONS))
    ]
    together = [out.outputs[0] for out in llm.chat(chats(QUESTIONS), params)]
    for question, chosen, expected in zip(QUESTIONS, params, together, strict=True):
        alone = llm.chat(chats([question]), chosen)[0].outputs[0]
        assert alone.token_ids == expected.token_ids
        assert alone.logprobs == expected.logprobs


@pytest.mark.slow
def test_the_file_is_near_its_own_expansion(smollm2: Path, tmp_path: Path) -> None:
    """Bounds of what is stored in 4 bits with int8 activations, and of what bf16 alone costs."""

    text = tmp_path / "scope.txt"
    text.write_text(PAGE.read_text())

    def figures(**args: bool) -> dict[str, float]:
        asked = EvalArgs(text=str(text), limit_tokens=400, context=400, stride=400, against="fp32", **args)
        return evaluate(EngineArgs(model=str(smollm2), threads=1), asked, detect_device(), WallClock())

    stored, expanded = figures(), figures(expand=True)
    assert stored["num_positions"] == 399
    assert stored["kl_mean"] < 0.08
    assert stored["top1_agreement"] > 0.8
    assert expanded["kl_mean"] < 0.002
    assert expanded["top1_agreement"] > 0.96
    assert 20.0 < stored["perplexity_original"] < 200.0
