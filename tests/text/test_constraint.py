"""Constraints: what they forbid, and that rollback undoes advance."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.request import SamplingParams
from quire.text.constraint import AllowedTokens, BadWords, MinTokens, TokenConstraint, build_constraints

VOCAB = 12


def forbidden(constraint: TokenConstraint) -> list[int]:
    allowed = np.ones(VOCAB, np.bool_)
    said = constraint.mask(allowed)
    ids = np.flatnonzero(~allowed).tolist()
    assert said == bool(ids)
    return ids


def test_allowed_tokens() -> None:
    constraint = AllowedTokens([7, 2, 7])
    assert forbidden(constraint) == [i for i in range(VOCAB) if i not in (2, 7)]
    both = np.ones(VOCAB, np.bool_)
    both[2] = False
    constraint.mask(both)
    assert np.flatnonzero(both).tolist() == [7], "a mask must not allow what another forbade"


def test_bad_words_ban_the_completing_id() -> None:
    constraint = BadWords([[4], [1, 2, 3], [1, 5], []])
    assert forbidden(constraint) == [4]
    constraint.advance(1)
    assert forbidden(constraint) == [4, 5]
    constraint.advance(2)
    assert forbidden(constraint) == [3, 4]
    constraint.advance(9)
    assert forbidden(constraint) == [4]
    constraint.rollback(1)
    assert forbidden(constraint) == [3, 4]


def test_min_tokens() -> None:
    constraint = MinTokens(2, [0, 11])
    assert forbidden(constraint) == [0, 11]
    constraint.advance(5)
    assert forbidden(constraint) == [0, 11]
    constraint.advance(5)
    assert forbidden(constraint) == []
    constraint.rollback(1)
    assert forbidden(constraint) == [0, 11]


@pytest.mark.parametrize("seed", range(20))
def test_rollback_equals_never_having_advanced(seed: int) -> None:
    rng = random.Random(seed)
    params = SamplingParams(
        min_tokens=rng.randint(0, 6),
        eos_token_ids=(0,),
        bad_words_token_ids=[[rng.randrange(3) for _ in range(rng.randint(1, 3))] for _ in range(4)],
        allowed_token_ids=rng.sample(range(VOCAB), 8),
    )
    lived, kept = build_constraints(params, VOCAB), []
    for _ in range(40):
        drafts = [rng.randrange(3) for _ in range(rng.randint(1, 4))]
        accepted = rng.randint(0, len(drafts))
        for constraint in lived:
            for token_id in drafts:
                constraint.advance(token_id)
            constraint.rollback(len(drafts) - accepted)
        kept += drafts[:accepted]
        fresh = build_constraints(params, VOCAB)
        for constraint, again in zip(lived, fresh, strict=True):
            for token_id in kept:
                again.advance(token_id)
            assert forbidden(constraint) == forbidden(again), f"seed {seed}"
