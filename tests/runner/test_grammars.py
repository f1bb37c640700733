"""The worker's grammars: built beside the model, waited for when a row samples; an error stays with its sequence."""

from __future__ import annotations

import json
import threading

import pytest
import torch

from quire.models.quill import quill_path
from quire.request import SamplingParams
from quire.runner import grammars as grammars_module
from quire.runner.grammars import Grammars
from quire.sampling.sampler import SeqSample
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


def allowed(grammars: Grammars, *seq_ids: int) -> list[list[int]]:
    logits = torch.zeros(len(seq_ids), VOCAB)
    assert grammars.apply(logits, seq_ids) == {}
    return [torch.isfinite(row).nonzero().flatten().tolist() for row in logits]


def test_rows_without_a_grammar_are_not_touched_and_cost_no_thread() -> None:
    before = threading.active_count()
    grammars = Grammars(PATH, VOCAB, 1)
    grammars.add(new(1, None))
    logits = torch.randn(1, VOCAB)
    copy = logits.clone()
    assert grammars.apply(logits, [1]) == {}
    grammars.follow(grammars.held([1]), [SeqSample(5)])
    assert torch.equal(logits, copy)
    assert threading.active_count() == before


def test_a_batch_follows_its_own_grammars() -> None:
    grammars = Grammars(PATH, VOCAB, 1)
    for seq_id, source in ((1, DIGITS), (2, None), (3, grammar(choice=["ab"]))):
        grammars.add(new(seq_id, source))
    first = allowed(grammars, 3, 2, 1)
    assert len(first[1]) == VOCAB
    digit = first[2][0]
    grammars.follow(grammars.held([3, 2, 1]), [SeqSample(first[0][0]), SeqSample(9), SeqSample(digit)])
    second = allowed(grammars, 1, 3)
    assert second[0]
    assert second[0] != first[2] or second[1] != first[0]
    grammars.add(new(1, DIGITS, (digit,), epoch=1))  # preempted and admitted again
    assert allowed(grammars, 1) == [second[0]]
    grammars.remove(1)
    assert len(allowed(grammars, 1)[0]) == VOCAB


def test_the_end_and_after_it() -> None:
    grammars = Grammars(PATH, VOCAB, 1)
    grammars.add(new(1, DIGITS))
    for _ in range(3):
        (ids,) = allowed(grammars, 1)
        if ids == [EOS]:
            break
        grammars.follow(grammars.held([1]), [SeqSample(ids[0])])
    assert allowed(grammars, 1) == [[EOS]]
    grammars.follow(grammars.held([1]), [SeqSample(EOS)])


def test_the_same_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(
        grammars_module,
        "compile_matcher",
        lambda tokenizer, text: compiled.append(text) or compile_matcher(tokenizer, text),
    )
    grammars = Grammars(PATH, VOCAB, 1)
    for seq_id in range(5):
        grammars.add(new(seq_id, DIGITS))
    rows = allowed(grammars, *range(5))
    assert rows == [rows[0]] * 5
    assert compiled == [DIGITS]


@pytest.mark.parametrize(
    ("path", "source", "said"),
    [("", DIGITS, "no tokenizer"), ("/nowhere", DIGITS, "/nowhere"), (PATH, "start: nothing", "nothing")],
)
def test_what_cannot_be_built_fails_its_sequence(path: str, source: str, said: str) -> None:
    grammars = Grammars(path, VOCAB, 1)
    grammars.add(new(1, source))
    grammars.add(new(2, None))
    logits = torch.zeros(2, VOCAB)
    failed = grammars.apply(logits, [2, 1])
    assert list(failed) == [1]
    assert said in failed[1]
    assert torch.isfinite(logits).all()


def test_a_token_that_the_grammar_forbids_is_an_error_not_a_crash() -> None:
    grammars = Grammars(PATH, VOCAB, 1)
    grammars.add(new(1, DIGITS))
    grammars.add(new(2, DIGITS))
    wrong = next(i for i in range(VOCAB) if i not in allowed(grammars, 1)[0])
    grammars.follow(grammars.held([1, 2]), [SeqSample(wrong), SeqSample(allowed(grammars, 2)[0][0])])
    assert list(grammars.apply(torch.zeros(2, VOCAB), [1, 2])) == [1]
