"""Files of `quire eval`: what is read, and errors that name file, line and field; windows; percentiles."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.eval.oracle import scored_by_hugging_face, scored_by_llama_cpp

from quire.errors import ConfigError, StepError
from quire_lab.eval.figures import Compared, Positions, compare, log_probabilities
from quire_lab.eval.inputs import ChoiceTask, Document, parse_line, read_inputs
from quire_lab.eval.windows import halves, sliding


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second\r\ntext")
    (tmp_path / "a.raw.gz").write_bytes(gzip.compress(b"first\n"))
    (tmp_path / "c.jsonl").write_text(
        '{"text": "third"}\n\n{"context": "q", "choices": ["x", "y"], "gold": 1}\n'
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.jsonl.gz").write_bytes(gzip.compress(b'{"text": "fourth"}'))
    (tmp_path / "notes.md").write_text("not read")
    (tmp_path / "empty.txt").write_text(" \n")
    found = read_inputs(tmp_path)
    assert [document.text for document in found.documents] == ["first\n", "second\r\ntext", "third", "fourth"]
    assert found.documents[2].where == f"{tmp_path}/c.jsonl:1"
    assert found.tasks == (ChoiceTask(f"{tmp_path}/c.jsonl:3", "q", ("x", "y"), 1),)


@pytest.mark.parametrize(
    ("line", "gold"),
    [
        ('{"context": "q", "choices": ["x", "y"], "gold": 0}', 0),
        ('{"ctx": "q", "endings": ["x", "y"], "label": "1"}', 1),
        ('{"question": "q", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B"}', 1),
        ('{"question": "q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "1"}', 0),
        ('{"query": "q", "options": ["x", "y"], "answer": "B"}', 1),
        ('{"query": "q", "choices": ["x", "y"], "answer": "y"}', 1),
    ],
)
def test_spellings_of_a_task(line: str, gold: int) -> None:
    assert parse_line(line, "f:1") == ChoiceTask("f:1", "q", ("x", "y"), gold)


def test_a_line_of_text() -> None:
    assert parse_line('{"text": "t", "meta": 1}', "f:1") == Document("f:1", "t")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "f:7: not valid JSON"),
        ("[1]", r"f:7: \[1\] must be a JSON object"),
        ("{}", 'f:7: the object needs "text".*it has no field'),
        ('{"txt": "a"}', "it has 'txt'"),
        ('{"text": 3}', "f:7: text = 3 must be a text"),
        ('{"context": 3, "choices": ["x", "y"], "gold": 0}', "f:7: context = 3 must be a text"),
        ('{"choices": ["x", "y"], "gold": 0}', "f:7: context is missing"),
        ('{"context": "q", "choices": ["x", "y"]}', "f:7: gold is missing"),
        ('{"context": "q", "choices": ["x"], "gold": 0}', "f:7: choices = .* must be a list of two texts"),
        ('{"context": "q", "choices": ["x", ""], "gold": 0}', "none empty"),
        ('{"context": "q", "choices": "xy", "gold": 0}', "f:7: choices = 'xy' must be"),
        ('{"context": "q", "choices": ["x", "y"], "gold": 2}', r"f:7: gold = 2 must be the index \(0…1\)"),
        ('{"context": "q", "choices": ["x", "y"], "gold": -1}', "f:7: gold = -1 must"),
        ('{"context": "q", "choices": ["x", "y"], "gold": true}', "f:7: gold = True must"),
        ('{"context": "q", "choices": ["x", "y"], "label": "C"}', "f:7: label = 'C' must"),
        ('{"context": "q", "choices": {"text": ["x", "y"], "label": ["A"]}, "gold": "A"}', "choices.label"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_line(line, "f:7")


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"one\ntwo \xff\n")
    with pytest.raises(ConfigError, match=r"bad.txt:2: not UTF-8"):
        read_inputs(bad)
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"text" * 99)[:-12])
    with pytest.raises(ConfigError, match=r"cut.txt.gz: cannot be read"):
        read_inputs(tmp_path / "cut.txt.gz")
    with pytest.raises(ConfigError, match="there is no file or folder"):
        read_inputs(tmp_path / "none.txt")
    (tmp_path / "page.html").write_text("x")
    with pytest.raises(ConfigError, match=r"of a kind that is not read; allowed: \.txt"):
        read_inputs(tmp_path / "page.html")
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="has no file of the kinds"):
        read_inputs(tmp_path / "other")
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(ConfigError, match="has no text in it"):
        read_inputs(tmp_path / "blank.txt")


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 15, 16, 17, 40, 61])
def test_windows_score_what_their_sources_do(num_tokens: int) -> None:
    ids = list(range(100, 100 + num_tokens))
    for context, stride in ((16, 8), (16, 16), (16, 5), (2, 1), (100, 50)):
        windows = list(sliding(ids, context, stride))
        scored = [
            (w.token_ids[0] - 100, w.token_ids[-1] - 99, i - 100)
            for w in windows
            for i in w.token_ids[w.first :]
        ]
        assert scored == scored_by_hugging_face(num_tokens, context, stride)
    for begin in ([], [7]):
        chunks = list(halves(ids, 16, begin))
        scored = [
            (w.token_ids[-1] - 115, w.token_ids[-1] - 99, i - 100)
            for w in chunks
            for i in w.token_ids[w.first :]
        ]
        assert scored == scored_by_llama_cpp(num_tokens, 16)
        assert all(w.token_ids[0] == 7 for w in chunks if begin)


@pytest.mark.parametrize("count", [9_999, 10_000])
def test_the_last_percentile_needs_ten_thousand_positions(count: int) -> None:
    kl = np.random.default_rng(1).exponential(size=count)
    positions = Positions()
    for part in np.array_split(kl, 7):
        positions.add(part, Compared(part, part, part, part))
    found = positions.summary()
    assert found["num_positions"] == count
    assert found["kl_p99"] == np.quantile(kl, 0.99)
    assert found["kl_p999"] == (np.quantile(kl, 0.999) if count == 10_000 else None)


def test_a_token_that_the_original_excludes_adds_nothing() -> None:
    original = log_probabilities(torch.tensor([[0.0, 1.0, -torch.inf]]))
    model = log_probabilities(torch.tensor([[0.5, 1.0, 2.0]]))
    p, q = original.exp().numpy()[0], model.numpy()[0]
    expected = sum(p[i] * (np.log(p[i]) - q[i]) for i in (0, 1))
    found = compare(model, original, torch.tensor([1]))
    assert found.kl == pytest.approx([expected])
    assert found.same_top1 == [0.0]
    assert compare(original, model, torch.tensor([1])).kl == [np.inf]


def test_logits_that_are_not_finite_stop_the_run() -> None:
    with pytest.raises(StepError, match="not finite"):
        log_probabilities(torch.tensor([[0.0, torch.nan]]))
