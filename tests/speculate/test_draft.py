"""Draft models: what is refused, what the configuration counts, and answers that equal those without."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.args import EngineArgs
from quire.device import detect_device
from quire.engine.assemble import check_vocabulary, configure, find_draft, llm_args
from quire.errors import ConfigError
from quire.models.checkpoint import describe, read_tokenizer
from quire.models.hub import quill_path
from quire.scheduler.settings import PolicyChange
from quire.text.tokenizer import Tokenizer

pytestmark = pytest.mark.component

QUILL = EngineArgs(model="quill", kv_memory="16MiB", max_model_len=512)
PROMPTS = ["It was a dark and", "The cat sat on the mat. The cat sat on", "Once upon a time"]


@pytest.fixture(scope="module")
def quill() -> Path:
    return quill_path("quill")


def outputs(**settings: object) -> tuple[list[object], int]:
    llm = LLM("quill", kv_memory="16MiB", max_model_len=512, **settings)
    params = [
        SamplingParams(temperature=0.0, seed=1, max_tokens=40),
        SamplingParams(temperature=0.9, seed=2, max_tokens=40, logprobs=1, frequency_penalty=0.4, n=2),
        SamplingParams(temperature=0.7, seed=3, max_tokens=40, top_p=0.9, stop=[" the"]),
    ]
    found = [
        [(o.token_ids, o.logprobs, o.text, o.finish_reason) for o in answer.outputs]
        for each in params
        for answer in llm.generate(PROMPTS, each)
    ]
    num_accepted = llm.client.core.stats().num_accepted_tokens
    llm.close()
    return found, num_accepted


def test_answers_equal_those_without_drafts() -> None:
    plain, _ = outputs()
    for settings in (
        {"speculate": "ngram", "spec_tokens": 4},
        {"speculate": "draft"},
        {"draft_model": "self:int8", "spec_tokens": 3},
    ):
        found, num_accepted = outputs(**settings)
        assert found == plain, settings
        assert num_accepted > 0, settings


def test_draft_weights_and_kv_are_counted() -> None:
    device = detect_device()
    plain, _ = configure(QUILL, device)
    drafting, _ = configure(replace(QUILL, draft_model="self:int8"), device)
    assert drafting.speculate is not None
    draft = drafting.speculate.draft
    assert draft is not None
    assert {held.kind for held in draft.formats.values()} == {"int8"}
    blocks, fewer = plain.cache.num_blocks, drafting.cache.num_blocks
    assert fewer == blocks // 2, "the draft model's blocks have the size of the model's"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spec_tokens": 0}, "spec_tokens = 0 must be 'auto' or a number in 1…32"),
        ({"spec_tokens": "many"}, "spec_tokens = 'many' must be 'auto' or a number in 1…32"),
        ({"speculate": "ngram", "draft_model": "self:int4"}, "has no use with speculate = 'ngram'"),
        ({"draft_model": "self:int5"}, "int5"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        configure(replace(QUILL, **settings), detect_device())  # type: ignore[arg-type]


def test_another_vocabulary_is_refused_with_the_first_difference(quill: Path) -> None:
    class Other(Tokenizer):
        """The same, but for two tokens."""

        def __init__(self) -> None:
            self.vocab_size = ours.vocab_size

        def id_to_token(self, token_id: int) -> str | None:
            return "other" if token_id in (77, 300) else ours.id_to_token(token_id)

    ours = read_tokenizer(quill)
    check_vocabulary("same", ours, ours)
    with pytest.raises(
        ConfigError, match="draft_model = 'another' has another vocabulary: id 77 is 'other' there"
    ):
        check_vocabulary("another", Other(), ours)


def test_quill_has_a_draft_model_of_its_own(quill: Path) -> None:
    checkpoint = describe(quill)
    found = find_draft(replace(QUILL, speculate="draft"), checkpoint)
    assert found is not None
    assert found.path == str(quill_path("quill-draft"))
    assert find_draft(QUILL, checkpoint) is None


def test_the_speculative_config_of_vllm_is_understood() -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
    assert llm_args("quill", {"speculative_config": ngram}) == EngineArgs(
        model="quill", speculate="ngram", spec_tokens=5, long_prefill_token_threshold=0
    )
    draft = {"model": "quill-draft", "num_speculative_tokens": 3}
    assert llm_args("quill", {"speculative_config": draft}) == EngineArgs(
        model="quill", draft_model="quill-draft", spec_tokens=3, long_prefill_token_threshold=0
    )
    for wrong, said in (
        ({"method": "hydra"}, "'hydra' must be one of ngram"),
        ({}, "method = None"),
        ({"method": "ngram", "tree": 3}, "the key 'tree'; allowed: method"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens = 0 must be 'auto' or"),
        ({"method": "ngram", "num_speculative_tokens": "3"}, "num_speculative_tokens = '3' must be"),
        ("ngram", "'ngram' must be a dict"),
    ):
        with pytest.raises(ConfigError, match=f"^speculative_config.*{said}"):
            llm_args("quill", {"speculative_config": wrong})


@pytest.mark.parametrize("settings", [{"speculate": "ngram"}, {"draft_model": "self:int8"}], ids=str)
def test_a_grammar_holds_with_drafts(settings: dict[str, object]) -> None:
    grammar = StructuredOutputsParams(regex=r"(ab|cd){3,9}, (red|blue) [0-9]{4}\.")
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=40, structured_outputs=grammar)

    def texts(**more: object) -> list[str]:
        llm = LLM("quill", kv_memory="16MiB", max_model_len=512, **more)
        found = [answer.outputs[0].text for answer in llm.generate(PROMPTS, params)]
        llm.close()
        return found

    plain = texts()
    assert all(re.fullmatch(r"(ab|cd){3,9}, (red|blue) [0-9]{4}\.", text) for text in plain)
    assert texts(**settings, spec_tokens=4) == plain


def test_a_proposer_that_fails_ends_speculation_alone(caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(temperature=0.9, seed=2, max_tokens=24, frequency_penalty=0.3)
    llm = LLM("quill", kv_memory="16MiB", max_model_len=256, speculate="draft", spec_tokens=4)
    worker = llm.client.core.executor.worker
    real, calls = worker.drafting.model.forward, 0

    def failing(rows: object) -> list[int]:
        nonlocal calls
        calls += 1
        if calls == 11:
            raise RuntimeError("a planted fault")
        return real(rows)

    worker.drafting.model.forward = failing
    found = [answer.outputs[0].token_ids for answer in llm.generate(PROMPTS, params)]
    llm.close()
    assert calls == 11
    assert "goes on without speculation" in caplog.text
    plain = LLM("quill", kv_memory="16MiB", max_model_len=256)
    assert found == [answer.outputs[0].token_ids for answer in plain.generate(PROMPTS, params)]
    plain.close()


def test_the_number_of_drafts_changes_while_the_engine_runs() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    llm = LLM("quill", kv_memory="16MiB", max_model_len=256, speculate="draft", spec_tokens=4)
    core = llm.client.core
    seen, texts = [], []
    for most in (4, 0, 2):
        core.scheduler.change_policy(PolicyChange(max_num_drafts=most, adaptive_drafts=False))
        before = core.stats()
        texts.append(llm.generate(PROMPTS[:1], params)[0].outputs[0].text)
        after = core.stats()
        rounds = after.num_verifications - before.num_verifications
        seen.append((after.num_draft_tokens - before.num_draft_tokens) / max(1, rounds))
    llm.close()
    assert texts[0] == texts[1] == texts[2]
    assert 3 < seen[0] <= 4, seen
    assert seen[1] == 0, seen
    assert 1.5 < seen[2] <= 2, seen
