"""Rules of acceptance other than the exact one: what they sample has the right distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.args import EngineArgs
from quire.device import detect_device
from quire.engine.assemble import configure
from quire.errors import ConfigError
from quire.kernels.sampling import COLUMNS, MIN_P, RANDOM, TRUNCATED
from quire.runner.draft_model import DraftModel
from quire.runner.heads import MedusaModel
from quire.sampling import accept
from quire.sampling.accept import Draft, probabilities, sample_with_drafts
from quire.sampling.sampler import Sampler
from quire.speculate.medusa import shape_of

VOCAB, NUM_SAMPLES = 12, 50_000
GENERATOR = 7


def columns_of(num_rows: int, **values: float) -> np.ndarray:
    """Columns of as many rows, each with noise of its own."""
    columns = np.zeros(num_rows, COLUMNS)
    columns["features"] = RANDOM | (TRUNCATED if {"top_k", "top_p"} & values.keys() else 0)
    columns["features"] |= MIN_P if "min_p" in values else 0
    columns["temperature"], columns["top_k"], columns["top_p"] = 1.0, VOCAB, 1.0
    columns["seed"], columns["position"] = np.arange(num_rows), 5
    for name, value in values.items():
        columns[name] = value
    return columns


def p_value(token_ids: np.ndarray, p: Tensor) -> float:
    """Of Pearson's chi-square test that ``token_ids`` are sampled from ``p [vocab]``."""
    counts = torch.from_numpy(np.bincount(token_ids, minlength=p.numel())).to(torch.float64)
    assert not counts[p == 0].any(), "a token that cannot be sampled was"
    expected = p[p > 0] * len(token_ids)
    statistic = ((counts[p > 0] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((expected.numel() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def drawn(rule: str, q: Tensor | None, **values: float) -> tuple[np.ndarray, Tensor, float]:
    """(tokens, the target's distribution, share of drafts accepted); ``q=None``: the likeliest token is the draft."""
    torch.manual_seed(GENERATOR)
    logits = 1.5 * torch.randn(VOCAB)
    columns = columns_of(NUM_SAMPLES, **values)
    if q is None:
        ids = np.full(NUM_SAMPLES, int(logits.argmax()))
        drafts = [[Draft(int(ids[0]))]] * NUM_SAMPLES
    else:
        ids = torch.multinomial(q, NUM_SAMPLES, replacement=True).numpy()
        drafts = [[Draft(int(token_id), q)] for token_id in ids]
    p = probabilities(logits[None], columns[:1])[0]
    plain = torch.multinomial(p, NUM_SAMPLES, replacement=True).numpy()
    found = sample_with_drafts(logits.expand(NUM_SAMPLES, -1), columns, drafts, plain, rule)
    return found, p, float((found == ids).mean())


def some_distribution() -> Tensor:
    torch.manual_seed(GENERATOR + 1)
    return torch.randn(VOCAB).softmax(dim=0)


@pytest.mark.parametrize(
    "values",
    [
        {"top_p": 0.8, "temperature": 1.3},
        *(
            pytest.param(v, marks=pytest.mark.slow)
            for v in ({}, {"temperature": 0.6}, {"top_k": 5}, {"min_p": 0.1})
        ),
    ],
    ids=str,
)
def test_rejection_keeps_the_distribution(values: dict[str, float]) -> None:
    for name, q in (("a model's draft", some_distribution()), ("a certain draft", None)):
        token_ids, p, share = drawn("rejection", q, **values)
        found = p_value(token_ids, p)
        print(f"{name}, {values}: p = {found:.3f} over {NUM_SAMPLES} samples, {share:.0%} accepted")
        assert found > 1e-4
        best = torch.minimum(p, q.to(p.dtype)).sum() if q is not None else p.max()
        assert share == pytest.approx(float(best), abs=0.01), "as many drafts as the rule allows"


def siblings(q: Tensor, count: int) -> list[list[Draft]]:
    """As many drafts per row as ``count``, sampled from ``q [vocab]`` without replacement, with their distributions."""
    ids = torch.multinomial(q.expand(NUM_SAMPLES, -1), count)
    rest = q.repeat(NUM_SAMPLES, 1)
    found: list[list[Draft]] = [[] for _ in range(NUM_SAMPLES)]
    for column in ids.T:
        probs = rest / rest.sum(dim=1, keepdim=True)
        for own, token_id, of_row in zip(found, column.tolist(), probs, strict=True):
            own.append(Draft(token_id, of_row))
        rest = rest.scatter(1, column[:, None], 0.0)
    return found


@pytest.mark.parametrize("right", [True, False])
def test_rejection_keeps_the_distribution_over_siblings(right: bool) -> None:
    """Wrong: the second draft is tried as if it were sampled from the distribution of the first."""
    torch.manual_seed(GENERATOR)
    logits = 1.5 * torch.randn(VOCAB)
    columns = columns_of(NUM_SAMPLES)
    q = some_distribution()
    drafts = siblings(q, 3)
    if not right:
        drafts = [[Draft(draft.token_id, q) for draft in own] for own in drafts]
    p = probabilities(logits[None], columns[:1])[0]
    found = sample_with_drafts(
        logits.expand(NUM_SAMPLES, -1), columns, drafts, np.zeros(NUM_SAMPLES), "rejection"
    )
    of_drafts = np.mean(
        [token_id in [d.token_id for d in own] for token_id, own in zip(found, drafts, strict=True)]
    )
    value = p_value(found, p)
    print(
        f"3 siblings, right rule: {right}: p = {value:.2g} over {NUM_SAMPLES} samples, {of_drafts:.0%} accepted"
    )
    assert (value > 1e-4) == right
    assert of_drafts > float(torch.minimum(p, q.to(p.dtype)).sum()) + 0.1, "siblings are worth something"


class Seqs:
    """What heads read of the sequences of a worker: each has noise of its own."""

    def __init__(self, count: int) -> None:
        self.all = [
            SimpleNamespace(seq_id=i, row=i, processors=None, drafting=SimpleNamespace(probs=[]))
            for i in range(count)
        ]
        self.columns, self.num_settled = columns_of(count), np.full(count, 5)

    def find(self, seq_id: int) -> SimpleNamespace:
        return self.all[seq_id]

    def drafting(self, seq: SimpleNamespace) -> SimpleNamespace:
        return seq.drafting


def of_medusa(seqs: Seqs, logits: Tensor) -> None:
    """Three choices of one head per sequence."""
    model = object.__new__(MedusaModel)
    model.worker_seqs, model.sampler, model.keeps_probs = seqs, Sampler(VOCAB), True
    model._logits = lambda of, _: logits.repeat(len(of), 1)
    for seq, drafts in zip(
        seqs.all, model.sample(range(len(seqs.all)), [shape_of(1, 3, 3)] * len(seqs.all)), strict=True
    ):
        seq.ids = drafts.token_ids


def of_eagle(seqs: Seqs, logits: Tensor) -> None:
    """A draft of each sequence, and a second one beside it."""
    model = object.__new__(DraftModel)
    model.vocab_size = model.own_vocab_size = VOCAB
    model.sampler, model.keeps_probs = Sampler(VOCAB), True
    model.runner = SimpleNamespace(compute=lambda step: logits.repeat(step.columns.size, 1))
    columns = seqs.columns.copy()
    for start in range(0, len(seqs.all), 5000):
        part = slice(start, start + 5000)
        firsts = model._sample(SimpleNamespace(columns=columns[part], sampling=seqs.all[part]))
        seconds = model.second(range(len(seqs.all)))
        for seq, first in zip(seqs.all[part], firsts, strict=True):
            seq.ids = (first, seconds[seq.seq_id])


@pytest.mark.parametrize("count", [10_000, pytest.param(200_000, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    ("heads", "right"),
    [(of_medusa, True), (of_medusa, False), pytest.param(of_eagle, True, marks=pytest.mark.slow)],
    ids=["medusa", "wrong", "eagle"],
)
def test_rejection_keeps_the_distribution_with_heads(
    heads: Callable[[Seqs, Tensor], None], right: bool, count: int
) -> None:
    """The drafts are those of the heads, with the distributions that they keep. Wrong: all with that of the first."""
    seqs = Seqs(count)
    torch.manual_seed(GENERATOR)
    logits = 1.5 * torch.randn(VOCAB)
    heads(seqs, torch.randn(VOCAB))
    drafts = [
        [
            Draft(token_id, probs if right else seq.drafting.probs[0])
            for token_id, probs in zip(seq.ids, seq.drafting.probs, strict=True)
        ]
        for seq in seqs.all
    ]
    p = probabilities(logits[None], seqs.columns[:1])[0]
    plain = np.zeros(count, np.int64)
    found = sample_with_drafts(logits.expand(count, -1), seqs.columns, drafts, plain, "rejection")
    share = np.mean([token_id in seq.ids for token_id, seq in zip(found, seqs.all, strict=True)])
    value = p_value(found, p)
    print(f"{heads.__name__}, right: {right}: p = {value:.2g} over {count} samples, {share:.0%} accepted")
    assert (value > 1e-4) == right


def test_a_wrong_rule_fails_the_same_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the residual is not taken, tokens that were accepted too often come too often."""
    real = accept.gumbel_argmax
    torch.manual_seed(GENERATOR)
    logits = 1.5 * torch.randn(VOCAB)
    monkeypatch.setattr(
        accept, "gumbel_argmax", lambda scores, streams: real(logits.expand_as(scores), streams)
    )
    token_ids, p, _ = drawn("rejection", some_distribution())
    found = p_value(token_ids, p)
    print(f"samples from p in the place of the residual: p = {found:.1e}")
    assert found < 1e-9


def test_typical_acceptance_keeps_only_likely_drafts() -> None:
    token_ids, p, share = drawn("typical", some_distribution())
    threshold = min(accept.EPSILON, accept.DELTA * float(torch.exp(torch.xlogy(p, p).sum())))
    q = some_distribution()
    expected = float(q[p >= threshold].sum() + (q[p < threshold] * p[p < threshold]).sum())
    assert share == pytest.approx(expected, abs=0.01)
    assert p_value(token_ids, p) < 1e-9, "the distribution changes, as the flag says"


def test_greedy_rows_have_one_likely_token() -> None:
    columns = columns_of(2)
    columns["features"][1] = 0
    logits = torch.tensor([0.0, 2.0, 2.0, -torch.inf]).repeat(2, 1)
    found = probabilities(logits, columns)
    assert found[1].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert found[0, 3] == 0.0
    assert float(found[0].sum()) == pytest.approx(1.0)


def tokens_of(num: int, num_ids: int, prompt: object, **settings: object) -> list[tuple[int, ...]]:
    """Four tokens out of ``num_ids`` ids each, for as many seeds."""
    llm = LLM("quill", kv_memory="16MiB", max_model_len=512, max_num_seqs=64, **settings)
    allowed = list(range(300, 300 + num_ids))
    params = [
        SamplingParams(temperature=1.5, seed=s, max_tokens=4, allowed_token_ids=allowed) for s in range(num)
    ]
    found = [tuple(a.outputs[0].token_ids) for a in llm.generate([prompt] * num, params)]
    num_accepted = llm.client.core.stats().num_accepted_tokens
    assert (num_accepted > num // 4) == bool(settings), num_accepted
    llm.close()
    return found


# Whatever is sampled of three ids was in this prompt before, and mostly what follows it as well.
REPEATS = {"prompt_token_ids": np.random.default_rng(3).choice([300, 301, 302], 400).tolist()}


@pytest.mark.parametrize(
    ("method", "num_ids", "prompt"), [("draft", 6, "It was a dark and"), ("ngram", 3, REPEATS)], ids=["draft", "ngram"]
)  # fmt: skip
def test_an_engine_samples_the_same_distribution(method: str, num_ids: int, prompt: object) -> None:
    num = 400
    plain = tokens_of(num, num_ids, prompt)
    other = tokens_of(num, num_ids, prompt, speculate=method, spec_tokens=3, spec_accept="rejection")
    assert plain != other, "the tokens of a seed are others"
    for name, part in (("third token", slice(2, 3)), ("last two tokens", slice(2, 4))):
        one, two = (Counter(ids[part] for ids in found) for found in (plain, other))
        seen = [key for key in one | two if one[key] + two[key] >= 10]
        statistic = sum((one[key] - two[key]) ** 2 / (one[key] + two[key]) for key in seen)
        freedom = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
        found = float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))
        print(f"{method}, {name}: p = {found:.3f} over {len(seen)} values")
        assert found > 1e-4


def test_greedy_answers_are_those_of_plain_decoding() -> None:
    def answer(**settings: object) -> object:
        llm = LLM("quill", kv_memory="16MiB", max_model_len=128, **settings)
        found = llm.generate(
            ["The cat sat on the mat. The cat"], SamplingParams(temperature=0.0, max_tokens=30)
        )
        llm.close()
        return found[0].outputs[0].token_ids

    assert answer(speculate="draft", spec_accept="rejection") == answer()


def test_determinism_tells_the_rule() -> None:
    for rule, name in (("exact", "exact"), ("rejection", "distribution"), ("typical", "approximate")):
        args = EngineArgs(model="quill", kv_memory="16MiB", speculate="ngram", spec_accept=rule)
        assert configure(args, detect_device())[0].determinism == name
    with pytest.raises(ConfigError, match="spec_accept = 'rejection' needs drafts"):
        configure(EngineArgs(model="quill", kv_memory="16MiB", spec_accept="rejection"), detect_device())
