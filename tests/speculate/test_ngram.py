"""Prompt lookup: the automaton against a search by hand, and what is drafted from it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.sampling.draft_tree import chain
from quire.speculate.ngram import MIN_MATCH, NgramProposer
from quire.speculate.proposer import Wanted
from quire.speculate.suffix_automaton import SuffixAutomaton

pytestmark = pytest.mark.component


def longest_repeated_suffix(text: list[int]) -> int:
    """By hand: how long a suffix of ``text`` is that occurs in it at another place, too."""
    for length in range(len(text) - 1, 0, -1):
        suffix = text[-length:]
        if any(text[at : at + length] == suffix for at in range(len(text) - length)):
            return length
    return 0


@pytest.mark.parametrize("vocab", [1, 2, 3, 9])
def test_the_suffix_is_the_longest_that_repeats(vocab: int) -> None:
    rng = random.Random(vocab)
    for _ in range(12):
        seen, text = SuffixAutomaton(), []
        for _ in range(60):
            text.append(rng.randrange(vocab))
            seen.extend(text[-1:])
            length = longest_repeated_suffix(text)
            assert seen.suffix_length == length
            if length:
                end = seen.previous_end
                assert end < len(text) - 1
                assert text[end + 1 - length : end + 1] == text[-length:]


def propose(text: list[int], limit: int) -> tuple[int, ...]:
    proposer = NgramProposer()
    (drafts,) = proposer.propose([Wanted(0, np.array(text, np.int32), limit, proposer.begin())])
    assert drafts.is_chain
    return drafts.token_ids


def test_drafts_are_what_followed_before() -> None:
    assert propose([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], 3) == (4, 5, 6)
    assert propose([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], 2) == (4, 5)
    assert propose([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], 9) == (4, 5, 6), "no more drafts than the match is long"


def test_a_short_match_is_no_reason_to_draft() -> None:
    assert MIN_MATCH == 2
    assert propose([1, 2, 3, 4, 9, 3], 4) == ()
    assert propose([1, 2, 3], 4) == ()


def test_a_period_goes_on() -> None:
    assert propose([1, 2, 3, 1, 2, 3, 1, 2, 3], 6) == (1, 2, 3, 1, 2, 3)
    assert propose([8, 8, 8, 8], 3) == (8, 8, 8)


def test_the_state_takes_in_new_tokens_alone() -> None:
    proposer = NgramProposer()
    state = proposer.begin()
    text = [1, 2, 3, 4, 5, 1, 2]
    for size in (3, 7):
        (drafts,) = proposer.propose([Wanted(0, np.array(text[:size], np.int32), 2, state)])
    assert drafts == chain((3, 4))
    assert state.size == 7


@pytest.mark.parametrize("vocab", [1, 4, 500])
def test_a_long_text_has_few_states(vocab: int) -> None:
    rng = random.Random(vocab)
    ids = [rng.randrange(vocab) for _ in range(5_000)]
    seen = SuffixAutomaton()
    seen.extend(ids + ids)
    assert seen.suffix_length >= len(ids)
    assert seen.num_states <= 2 * seen.size
