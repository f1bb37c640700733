"""Incremental detokenization equals the full decode, however the ids are cut, for real and for random ids."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.text.conftest import GOLDEN_FILES, Load

from quire.text.tokenizer import IncrementalDetokenizer, Tokenizer

NAMES = [*(paths[-1] for paths in GOLDEN_FILES.values()), "phi-2", "gpt-neox"]
OPTIONS = [(skip, continues) for skip in (True, False) for continues in (True, False)]
REPLACEMENT = "\ufffd"


def pieces_of(tokenizer: Tokenizer, ids: list[int], skip: bool, continues: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, continues=continues)
    return [*(detokenizer.feed(token_id) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("name", NAMES)
def test_every_golden_text(name: str, load: Load, golden: list[dict[str, Any]]) -> None:
    tokenizer = load(name)
    for case in golden:
        ids = tokenizer.encode(case["text"])
        for skip, continues in OPTIONS:
            pieces = pieces_of(tokenizer, ids, skip, continues)
            assert "".join(pieces) == tokenizer.decode(ids, skip, continues), case["id"]
            assert not any(REPLACEMENT in piece for piece in pieces), "no half characters in valid text"


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_ids_in_random_pieces(name: str, load: Load, data: st.DataObject) -> None:
    tokenizer = load(name)
    low = st.integers(0, 300)  # bytes and special tokens have such ids in most vocabularies
    ids = data.draw(st.lists(st.integers(-1, tokenizer.vocab_size + 2) | low, max_size=30))
    skip, continues = data.draw(st.sampled_from(OPTIONS))
    expected = tokenizer.decode(ids, skip, continues)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, continues=continues)
    text, at = "", 0
    while at < len(ids):
        size = data.draw(st.integers(1, len(ids) - at))
        text += "".join([detokenizer.feed(i) for i in ids[at : at + size]])
        assert expected.startswith(text), "what streamed is never contradicted"
        at += size
    assert text + detokenizer.finish() == expected


@pytest.mark.parametrize("name", NAMES)
def test_long_random_ids(name: str, load: Load) -> None:
    tokenizer = load(name)
    for seed in range(3):
        rng = random.Random(seed)
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(2000)]
        for skip, continues in OPTIONS:
            text = "".join(pieces_of(tokenizer, ids, skip, continues))
            assert text == tokenizer.decode(ids, skip, continues), f"seed {seed}"


def test_a_character_comes_when_its_last_byte_is_in(load: Load) -> None:
    llama2 = load("llama2/tokenizer.model")
    ids = [llama2.token_to_id(f"<0x{byte:02X}>") for byte in "🚀!".encode()]
    assert [i for i in ids if i is None] == []
    assert pieces_of(llama2, [i for i in ids if i is not None], True, True) == ["", "", "", "🚀", "!", ""]


def test_a_broken_character_comes_as_soon_as_it_is_certain(load: Load) -> None:
    llama2 = load("llama2/tokenizer.model")
    byte = {value: 3 + value for value in range(256)}
    ids = [byte[0xE4], byte[0xBD], byte[0x41], byte[0xF0], byte[0x9F]]
    assert pieces_of(llama2, ids, True, True) == ["", "", REPLACEMENT + "A", "", "", REPLACEMENT]
    assert llama2.decode(ids) == REPLACEMENT + "A" + REPLACEMENT


def test_special_tokens_inside_of_a_character_do_not_break_it(load: Load) -> None:
    llama2 = load("llama2/tokenizer.model")
    ids = [3 + 0xC3, 2, 3 + 0xA9]
    assert "".join(pieces_of(llama2, ids, True, True)) == "é" == llama2.decode(ids, continues=True)


def test_the_leading_space_of_sentencepiece(load: Load) -> None:
    llama2 = load("llama2/tokenizer.model")
    ids = llama2.encode("Hello world", add_special_tokens=False)
    assert pieces_of(llama2, ids, True, False) == ["Hello", " world", ""]
    assert pieces_of(llama2, ids, True, True) == [" Hello", " world", ""]
    assert pieces_of(llama2, [1, *ids], True, False) == ["", "Hello", " world", ""]
    two_spaces = llama2.encode("  x", add_special_tokens=False)
    assert "".join(pieces_of(llama2, two_spaces, True, False)) == "  x"


def test_finish_returns_the_incomplete_character_once(load: Load) -> None:
    llama2 = load("llama2/tokenizer.model")
    detokenizer = IncrementalDetokenizer(llama2)
    for token_id in (3 + 0x41, 3 + 0xE4):
        detokenizer.feed(token_id)
    assert detokenizer.finish() == REPLACEMENT
    assert detokenizer.finish() == ""


def test_no_ids_no_text(load: Load) -> None:
    detokenizer = IncrementalDetokenizer(load("gpt2"))
    assert detokenizer.finish() == ""


def test_rebuilding_equals_having_continued(load: Load, golden: list[dict[str, Any]]) -> None:
    tokenizer = load("gpt2")
    ids = tokenizer.encode(golden[40]["text"])
    for cut in range(len(ids)):
        lived = IncrementalDetokenizer(tokenizer)
        rebuilt = IncrementalDetokenizer(tokenizer)
        for token_id in ids[:cut]:
            lived.feed(token_id)
            rebuilt.feed(token_id)
        assert [lived.feed(i) for i in ids[cut:]] == [rebuilt.feed(i) for i in ids[cut:]]
        assert lived.finish() == rebuilt.finish()
