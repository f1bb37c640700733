"""The worker's grammars: built beside the model, waited for when a row samples; an error stays with its sequence."""

from __future__ import annotations

import json
import os
import random
import threading
from pathlib import Path

import pytest
import torch
from tests.sampling.test_verify import generate

from quire.models.hub import quill_path
from quire.request import SamplingParams
from quire.sampling import grammars as grammars_module
from quire.sampling.draft_tree import NO_DRAFTS, chain
from quire.sampling.grammars import Grammars, GrammarState
from quire.step import NewSeq
from quire.structured_outputs import StructuredOutputsParams
from quire.text.grammar import build_grammar, grammar_source
from quire.text.grammar_matcher import compile_matcher

VOCAB = 4096
PATH = str(quill_path("quill"))


def grammar(**form: object) -> str:
    return build_grammar(grammar_source(StructuredOutputsParams(**form)))  # type: ignore[arg-type]


DIGITS = grammar(regex="[0-9]{3}")


def eos_of() -> int:
    ids = json.loads((quill_path("quill") / "config.json").read_text())["eos_token_id"]
    return ids if isinstance(ids, int) else ids[0]


EOS = eos_of()
GREEDY = SamplingParams(temperature=0.0, seed=1, max_tokens=64, eos_token_ids=(EOS,))


def new(seq_id: int, source: str | None, output: tuple[int, ...] = (), epoch: int = 0) -> NewSeq:
    return NewSeq(seq_id, epoch, (1, 2), output, GREEDY, 0, grammar=source)


def allowed(*states: GrammarState) -> list[list[int]]:
    rows = []
    for state in states:
        logits = torch.zeros(1, VOCAB)
        state.apply(logits, NO_DRAFTS)
        assert state.error is None
        rows.append(torch.isfinite(logits[0]).nonzero().flatten().tolist())
    return rows


def test_rows_without_a_grammar_cost_no_thread() -> None:
    before = threading.active_count()
    grammars = Grammars(PATH, VOCAB, 1)
    grammars.follow([])
    assert threading.active_count() == before


def test_a_batch_follows_its_own_grammars() -> None:
    grammars = Grammars(PATH, VOCAB, 1)
    one, three = grammars.begin(new(1, DIGITS)), grammars.begin(new(3, grammar(choice=["ab"])))
    first = allowed(three, one)
    digit = first[1][0]
    grammars.follow([(three, first[0][0]), (one, digit)])
    second = allowed(one, three)
    assert second[0]
    assert second[0] != first[1] or second[1] != first[0]
    again = grammars.begin(new(1, DIGITS, (digit,), epoch=1))  # preempted and admitted again
    assert allowed(again) == [second[0]]


def test_the_end_and_after_it() -> None:
    grammars = Grammars(PATH, VOCAB, 1)
    state = grammars.begin(new(1, DIGITS))
    for _ in range(3):
        (ids,) = allowed(state)
        if ids == [EOS]:
            break
        grammars.follow([(state, ids[0])])
    assert allowed(state) == [[EOS]]
    grammars.follow([(state, EOS)])


def test_drafts_that_go_back_leave_no_trace() -> None:
    """Rows get the mask after the drafts before them; a forbidden draft ends them; all of it can be taken back."""
    grammars = Grammars(PATH, VOCAB, 1)
    state = grammars.begin(new(1, DIGITS))
    (first,) = allowed(state)
    digit = first[0]
    expected = [grammars.begin(new(2, DIGITS, (digit,) * count)) for count in range(3)]
    for drafts, usable in (((digit, digit), 2), ((digit, EOS), 1), ((EOS, digit), 0), ((digit, 5, digit), 1)):
        assert 5 not in first
        logits = torch.zeros(1 + len(drafts), VOCAB)
        assert state.apply(logits, chain(drafts)) == set(range(usable, len(drafts)))
        rows = [torch.isfinite(row).nonzero().flatten().tolist() for row in logits]
        assert rows[: usable + 1] == allowed(*expected[: usable + 1])
        state.accept([])
        assert allowed(state) == [first]
    logits = torch.zeros(3, VOCAB)
    state.apply(logits, chain((digit, digit)))
    state.accept([0])
    grammars.follow([(state, digit)])
    assert allowed(state) == allowed(expected[2])


def test_the_same_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(
        grammars_module,
        "compile_matcher",
        lambda tokenizer, text: compiled.append(text) or compile_matcher(tokenizer, text),
    )
    grammars = Grammars(PATH, VOCAB, 1)
    rows = allowed(*(grammars.begin(new(seq_id, DIGITS)) for seq_id in range(5)))
    assert rows == [rows[0]] * 5
    assert compiled == [DIGITS]


def test_a_grammar_that_has_grown_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lexer of a grammar grows with the tokens that it takes: what is remembered is bounded by both."""
    monkeypatch.setattr(grammars_module, "_MAX_BYTES", 80 * len(DIGITS) + 4 * 4096)
    grammars = Grammars(PATH, VOCAB, 1)
    first = grammars.begin(new(1, DIGITS))
    for i in range(4):  # one token each
        state = grammars.begin(new(10 + i, DIGITS))
        (ids,) = allowed(state)
        grammars.follow([(state, ids[0])])
        state.wait()
        assert state.compiled is first.compiled
    others = [grammars.begin(new(30 + i, grammar(choice=[f"a{i}"]))) for i in range(2)]
    allowed(*others)
    again = grammars.begin(new(40, DIGITS))
    allowed(again)
    assert again.compiled is not first.compiled
    alone = Grammars(PATH, VOCAB, 1)
    state = alone.begin(new(1, DIGITS))
    allowed(state)
    assert state.compiled is not None
    state.compiled.num_tokens = 10**6
    again = alone.begin(new(2, DIGITS))
    assert allowed(again) == allowed(state)
    assert again.compiled is not state.compiled


@pytest.mark.slow
def test_remembered_grammars_stay_within_their_memory() -> None:
    """RSS after many grammars whose lexers grow without end: the worker's share of 128 MiB, and what it had before."""
    grammars = Grammars(PATH, VOCAB, 1)
    allowed(grammars.begin(new(0, DIGITS)))
    before, most = resident_bytes(), 0
    for i in range(300):
        pattern = f"(.{{0,40}}foo{i}){{1,4000}}"
        state = grammars.begin(new(1 + i, grammar(regex=pattern)))
        rng = random.Random(i)
        for _ in range(120):
            (ids,) = allowed(state)
            grammars.follow([(state, rng.choice(ids))])
        state.wait()
        most = max(most, resident_bytes())
    print(f"{(most - before) / 2**20:.0f} MiB")
    assert most - before < 96 * 2**20  # 64 MiB by our count


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("path", "source", "said"),
    [("", DIGITS, "no tokenizer"), ("/nowhere", DIGITS, "/nowhere"), (PATH, "start: nothing", "nothing")],
)
def test_what_cannot_be_built_fails_its_sequence(path: str, source: str, said: str) -> None:
    state = Grammars(path, VOCAB, 1).begin(new(1, source))
    logits = torch.zeros(1, VOCAB)
    state.apply(logits, NO_DRAFTS)
    assert said in str(state.error)
    assert torch.isfinite(logits).all()


def test_a_token_that_the_grammar_forbids_is_an_error() -> None:
    grammars = Grammars(PATH, VOCAB, 1)
    one, two = grammars.begin(new(1, DIGITS)), grammars.begin(new(2, DIGITS))
    wrong = next(i for i in range(VOCAB) if i not in allowed(one)[0])
    grammars.follow([(one, wrong), (two, allowed(two)[0][0])])
    for state in (one, two):
        state.apply(torch.zeros(1, VOCAB), NO_DRAFTS)
    assert one.error is not None
    assert two.error is None


@pytest.mark.parametrize("right", [0.3, 1.0])
def test_drafts_change_nothing_under_a_grammar(right: float) -> None:
    vocab = 4096
    words = grammar(choice=["red", "green and blue", "white, black or grey"])
    seqs = [
        NewSeq(
            i, 0, (1, 2), (),
            SamplingParams(temperature=i % 3 * 0.7, seed=i, eos_token_ids=(EOS,), repetition_penalty=1.0 + i % 2 * 0.3,
                           logprobs=i % 4 or None),
            0, grammar=(DIGITS, words, grammar(regex="[a-z ]{4,30}"))[i % 3],
        )
        for i in range(9)
    ]  # fmt: skip
    plain = generate(seqs, 16, vocab, right=None, path=PATH)
    tokens, errors, num_accepted = generate(seqs, 16, vocab, right=right, path=PATH)
    assert plain[1] == [None] * 9
    assert (tokens, errors) == plain[:2]
    assert num_accepted >= 5 * right
