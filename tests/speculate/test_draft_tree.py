"""Trees of drafts: how they are cut into paths, merged, and walked."""

from __future__ import annotations

import random

import pytest

from quire.sampling.draft_tree import NO_DRAFTS, ROOT, Drafts, Walk, chain

TREE = Drafts.from_paths([[1, 2, 3], [1, 4], [5], [1, 2, 6, 7]], limit=10)


def test_common_beginnings_are_one() -> None:
    assert TREE.token_ids == (1, 2, 3, 4, 5, 6, 7)
    assert TREE.parents == (ROOT, 0, 1, 0, ROOT, 1, 5)
    assert not TREE.is_chain
    assert Drafts.from_paths([[1, 2, 3], [1, 4], [5]], limit=4).token_ids == (1, 2, 3, 4)
    assert Drafts.from_paths([[7, 8], [7, 8]], limit=4) == chain([7, 8])


def test_each_draft_is_in_one_path() -> None:
    assert TREE.paths() == [[0, 1, 2], [5, 6], [3], [4]]
    assert TREE.trunk() == chain([1, 2, 3])
    assert TREE.first(4).paths() == [[0, 1, 2], [3]]
    assert NO_DRAFTS.paths() == []
    assert not NO_DRAFTS


@pytest.mark.parametrize("seed", range(3))
def test_a_walk_ends_behind_the_tokens_of_its_path(seed: int) -> None:
    rng = random.Random(seed)
    parents = tuple(rng.randrange(ROOT, node) if node else ROOT for node in range(12))
    drafts = Drafts(tuple(range(100, 112)), parents)
    tokens: list[int] = []

    def rollback(count: int) -> None:
        del tokens[-count:]

    walk = Walk(drafts, tokens.append, rollback)
    for _ in range(60):
        node = rng.randrange(ROOT, 12)
        walk.to(node)
        assert tokens == [drafts.token_ids[each] for each in drafts.path(node)]
