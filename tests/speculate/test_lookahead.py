"""Lookahead decoding: the window finds what the model goes on to say, without a text that repeats."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.sampling.draft_tree import ROOT, Drafts
from quire.speculate.lookahead import LEVELS, LookaheadProposer
from quire.speculate.proposer import Wanted

pytestmark = pytest.mark.component

PROMPTS = ["It was a dark and", "The cat sat on the mat. The cat sat on", "Once upon a time"]


def after(token_id: int) -> int:
    """The model: its next token is a function of the last one alone, without a short period."""
    return (7 * token_id + 3) % 997


def verified(drafts: Drafts, last: int) -> tuple[list[int], tuple[int, ...]]:
    """The tokens that a step gives, and what it samples behind the last known token and each draft."""
    sampled = (after(last), *map(after, drafts.token_ids))
    tokens, node = [sampled[0]], ROOT
    for draft, (token_id, parent) in enumerate(zip(drafts.token_ids, drafts.parents, strict=True)):
        if parent == node and token_id == sampled[1 + node]:
            node = draft
            tokens.append(sampled[1 + draft])
    return tokens, sampled


@pytest.mark.parametrize("limit", [8, 12, 32])
def test_n_grams_are_what_the_model_says(limit: int) -> None:
    """The text never repeats, so what the pool knows beside it comes out of the window, and is right."""
    proposer = LookaheadProposer()
    state, known, sampled = proposer.begin(), [5, 900, 33, 78], ()
    while len(known) < 80:
        (drafts,) = proposer.propose([Wanted(0, np.array(known, np.int32), limit, state, 16, sampled)])
        assert 0 < len(drafts) <= limit
        assert len(drafts.paths()) <= 16
        tokens, sampled = verified(drafts, known[-1])
        known += tokens
    assert known[4:] == [after(token_id) for token_id in known[3:-1]], "the model's own tokens"
    made = {(first, *rest) for first, found in state.pool.items() for rest in found}
    made -= {tuple(known[at : at + LEVELS + 1]) for at in range(len(known))}
    right = [all(after(a) == b for a, b in pairwise(ngram)) for ngram in made]
    assert len(made) > 40
    assert right.count(False) <= 4 * LEVELS * max(1, limit // 6), "guesses of the first steps alone"


def test_n_grams_of_the_last_token_are_drafts() -> None:
    proposer = LookaheadProposer()
    state = proposer.begin()
    state.add([78, *(chain := [after(78), after(after(78)), 7])])
    (drafts,) = proposer.propose([Wanted(0, np.array([5, 78], np.int32), 12, state, 4)])
    assert drafts.token_ids[:LEVELS] == tuple(chain)
    assert verified(drafts, 78)[0][:3] == [*chain[:2], after(chain[1])]


def test_a_step_without_room_leaves_the_window() -> None:
    proposer = LookaheadProposer()
    state = proposer.begin()
    (drafts,) = proposer.propose([Wanted(0, np.array([1, 2, 3], np.int32), 12, state, 4)])
    levels = [list(level) for level in state.levels]
    assert len(levels) == LEVELS
    proposer.propose([Wanted(0, np.array([1, 2, 3, 4], np.int32), 12, state, 4, (4, 9))])
    assert state.levels == levels
    assert len(drafts) == 12 // 2


def test_answers_equal_those_without_drafts() -> None:
    def answers(**settings: object) -> tuple[list[object], int]:
        llm = LLM("quill", kv_memory="16MiB", max_model_len=512, **settings)
        found: list[object] = []
        for params in (
            SamplingParams(temperature=0.0, max_tokens=48),
            SamplingParams(temperature=0.9, seed=2, max_tokens=32, logprobs=1, frequency_penalty=0.4, n=2),
        ):
            for answer in llm.generate(PROMPTS, params):
                found += [(o.token_ids, o.logprobs, o.text) for o in answer.outputs]
        num_accepted = llm.client.core.stats().num_accepted_tokens
        llm.close()
        return found, num_accepted

    plain, _ = answers()
    found, num_accepted = answers(speculate="lookahead", spec_tokens=12)
    assert found == plain
    assert num_accepted > 10
