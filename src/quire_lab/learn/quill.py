"""Quill with eyes on it: every row of logits that samples, every round of speculation. Loads torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from threading import Lock

import torch
from torch import Tensor

from quire.config import MAX_DRAFTS
from quire.engine.llm import LLM
from quire.executor.local import LocalExecutor
from quire.request import SamplingParams
from quire.runner.model_runner import ModelRunner
from quire.sampling.accept import probabilities
from quire.sampling.sampler import column_values, new_columns
from quire.scheduler.settings import PolicyChange
from quire.step import NewSeq, StepPlan, StepResult

_LOCK = Lock()  # one simulation at a time uses an engine


@dataclass(frozen=True, slots=True)
class Sampled:
    """One decode step: distributions ``[vocab] float64`` and the token that was sampled."""

    text: str
    token_id: int
    model: Tensor  # softmax of the logits
    warm: Tensor  # with temperature
    kept: Tensor  # with temperature and truncation: the sampler's input


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: its text, its tokens, and what ended it."""

    text: str
    words: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Round:
    """One verification: the drafts, how many were accepted, and the token behind them."""

    drafts: tuple[str, ...]
    num_accepted: int
    next_token: str


@dataclass
class Watch:
    """What an executor's steps had to verify, and what they got."""

    executor: LocalExecutor
    rounds: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    _plan: StepPlan | None = None

    def submit(self, plan: StepPlan) -> None:
        self._plan = plan
        type(self.executor).submit(self.executor, plan)

    def collect(self) -> StepResult:
        plan = self._plan
        drafts: tuple[int, ...] = ()
        if plan is not None and plan.seqs:
            seq = self.executor.worker.seqs.find(plan.seqs[0].seq_id)
            if seq is not None and seq.drafting is not None:
                drafts = seq.drafting.drafts.token_ids[: plan.seqs[0].num_draft_tokens]
        result = type(self.executor).collect(self.executor)
        if result.seqs and result.seqs[0].token_ids:
            self.rounds.append((tuple(drafts), result.seqs[0].token_ids))
        return result


@cache
def engine(draft: str) -> LLM:
    """Return Quill, kept for the next simulation; ``draft``: "", "ngram" or the name of a draft model."""
    settings: dict[str, object] = {"max_model_len": 512, "num_kv_blocks": 64, "max_num_seqs": 1}
    if draft == "ngram":
        settings |= {"speculate": "ngram", "spec_tokens": MAX_DRAFTS}
    elif draft:
        settings |= {"draft_model": draft, "spec_tokens": MAX_DRAFTS}
    return LLM("quill", **settings)


def decode(prompt: str, sampling: SamplingParams) -> tuple[str, list[Sampled]]:
    """Return the text and each of its steps."""
    with _LOCK:
        llm, rows = engine(""), list[Tensor]()
        with _observed(llm, rows):
            output = llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0]
    vocab = rows[0].shape[0]
    plain, warm = (SamplingParams(temperature=t, seed=0) for t in (1.0, sampling.temperature))
    token_ids = list(output.token_ids)
    texts = _texts(llm, token_ids)
    steps = [
        Sampled(text, token_id, _distribution(row, plain, vocab), _distribution(row, warm, vocab),
                _distribution(row, sampling, vocab))
        for text, token_id, row in zip(texts, token_ids, rows, strict=False)
    ]  # fmt: skip
    return output.text, steps


def answer(prompt: str, sampling: SamplingParams) -> Answer:
    """Return the engine's answer."""
    with _LOCK:
        llm = engine("")
        output = llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0]
    return Answer(output.text, tuple(_texts(llm, output.token_ids)), output.finish_reason or "")


def ids_of(text: str) -> list[int]:
    """Return the tokens of a text, as Quill's tokenizer cuts it."""
    return list(engine("").get_tokenizer().encode(text))


def speculate(prompt: str, sampling: SamplingParams, draft: str, num_drafts: int) -> tuple[str, list[Round]]:
    """Return the text and the rounds of its speculation."""
    with _LOCK:
        llm = engine(draft)
        llm.client.send(PolicyChange(max_num_drafts=num_drafts, adaptive_drafts=False))
        with _watched(llm) as watch:
            output = llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0]
    rounds = []
    for drafts, token_ids in watch.rounds:
        words = _texts(llm, [*drafts, token_ids[-1]])
        rounds.append(Round(tuple(words[:-1]), len(token_ids) - 1, words[-1]))
    return output.text, rounds


def _distribution(row: Tensor, sampling: SamplingParams, vocab: int) -> Tensor:
    columns = new_columns(1)
    columns[0] = column_values(NewSeq(0, 0, (0,), (), sampling, 0), vocab, edited=False)
    return probabilities(row[None].clone(), columns)[0]


def _texts(llm: LLM, token_ids: Sequence[int]) -> list[str]:
    return [llm.get_tokenizer().decode([token_id]) for token_id in token_ids]


@contextmanager
def _observed(llm: LLM, rows: list[Tensor]) -> Iterator[None]:
    runner = _executor(llm).worker.runner
    assert isinstance(runner, ModelRunner)
    runner.observe_logits = lambda seq_id, position, row: rows.append(row.to(torch.float32).clone())
    try:
        yield
    finally:
        runner.observe_logits = None


@contextmanager
def _watched(llm: LLM) -> Iterator[Watch]:
    executor = _executor(llm)
    watch = Watch(executor)
    executor.submit, executor.collect = watch.submit, watch.collect  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        del executor.submit, executor.collect


def _executor(llm: LLM) -> LocalExecutor:
    executor = llm.client.core.executor
    assert isinstance(executor, LocalExecutor)
    return executor


def spelled(token_ids: Sequence[int]) -> list[str]:
    """Return the text of each token of Quill."""
    return _texts(engine(""), token_ids)
