"""The draft model's K and V: what it computes when drafts hold, are rejected, or blocks come back empty."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.sampling.draft_tree import NO_DRAFTS
from quire.speculate.draft import DraftProposer, Rows
from quire.speculate.proposer import Wanted


class FakeModel:
    """Samples (last token + 1) % 50; its cache has the token that was computed at each position."""

    max_tokens = 120
    max_rows = 16

    def __init__(self, native: random.Random | None = None) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.cache: dict[int, list[int]] = {}
        self.filled: dict[int, int] = {}  # known tokens with K and V
        self.num_appended = 0
        self.num_rows = 0
        self.shared: set[int] = set()  # sequences whose next block is the same one
        self.native = native  # whether chains are computed in one call; None: never

    def num_computed(self, seq_id: int, num_known: int, num_agreed: int) -> int:
        cached = len(self.cache.setdefault(seq_id, []))
        count = min(self.filled.get(seq_id, 0), cached, num_known)
        return min(cached, num_agreed) if count == num_known else count

    def claim(self, seq_id: int, start: int, end: int, claimed: set[int]) -> int:
        block = -1 if seq_id in self.shared else seq_id
        if block in claimed:
            return start
        claimed.add(block)
        return end

    def forward(self, rows: list[Rows]) -> list[int]:
        found = []
        for seq_id, start, end in rows:
            tokens, cache = self.tokens[seq_id], self.cache[seq_id]
            assert cache[:start] == tokens[:start], "K and V of other tokens are read"
            cache[start:] = tokens[start:end]
            if not self.num_appended:
                self.filled[seq_id] = end
            self.num_rows += end - start
            found.append((tokens[end - 1] + 1) % 50)
        assert sum(end - start for _, start, end in rows) <= self.max_rows
        return found

    def chains(self, rows: list[Rows], counts: list[int]) -> list[list[int]] | None:
        if self.native is None or self.native.random() < 0.3:
            return None
        found = []
        for (seq_id, start, end), count in zip(rows, counts, strict=True):
            assert end == len(self.tokens[seq_id])
            drafts = self.forward([Rows(seq_id, start, end)])
            for place in range(count - 1):
                self.append(seq_id, drafts[-1])
                drafts += self.forward([Rows(seq_id, end + place, end + place + 1)])
            self.take_back(seq_id, count - 1)
            found.append(drafts)
        return found

    def second(self, seq_ids: set[int]) -> dict[int, int]:
        return {seq_id: (self.tokens[seq_id][-1] + 2) % 50 for seq_id in seq_ids if seq_id != 1}

    def append(self, seq_id: int, token_id: int) -> None:
        self.tokens[seq_id].append(token_id)
        self.num_appended += 1

    def take_back(self, seq_id: int, num_drafts: int) -> None:
        if num_drafts:
            del self.tokens[seq_id][-num_drafts:]
        self.num_appended -= num_drafts


@pytest.mark.parametrize("seed", range(4))
def test_every_row_is_computed_behind_the_right_tokens(seed: int) -> None:
    rng = random.Random(seed)
    model = FakeModel(None if seed % 2 else rng)
    proposer = DraftProposer(model)
    states = {i: proposer.begin() for i in range(3)}
    model.tokens = {i: [rng.randrange(50) for _ in range(rng.randint(1, 30))] for i in range(3)}
    num_drafts = 0
    for _ in range(25):
        wanted = [
            Wanted(i, np.array(tokens, np.int32), rng.randint(1, 4), states[i])
            for i, tokens in model.tokens.items()
            if rng.random() < 0.8
        ]
        for each, proposed in zip(wanted, proposer.propose(wanted), strict=True):
            assert proposed.is_chain
            drafts = proposed.token_ids
            tokens = model.tokens[each.seq_id]
            assert tokens == each.token_ids.tolist(), "drafts are taken back"
            assert len(drafts) <= each.limit
            assert list(drafts) == [(tokens[-1] + 1 + i) % 50 for i in range(len(drafts))]
            num_drafts += len(drafts)
            accepted = drafts[: rng.randint(0, len(drafts))]
            tokens += [*accepted, rng.randrange(50)]
        for seq_id in model.tokens.keys() - {
            each.seq_id for each in wanted
        }:  # these had no drafts in this step
            model.tokens[seq_id].append(rng.randrange(50))
        if rng.random() < 0.2:  # a block was given back
            cache = model.cache.get(0, [])
            del cache[len(cache) // 2 :]
    assert num_drafts > 60


def test_a_sequence_waits_while_another_fills_its_block() -> None:
    model = FakeModel()
    proposer = DraftProposer(model)
    model.tokens, model.shared = {0: [1, 2, 3], 1: [1, 2, 3]}, {0, 1}
    wanted = [
        Wanted(seq_id, np.array(tokens, np.int32), 2, proposer.begin())
        for seq_id, tokens in model.tokens.items()
    ]
    assert [drafts.token_ids for drafts in proposer.propose(wanted)] == [(4, 5), ()]
    model.shared.clear()
    assert [drafts.token_ids for drafts in proposer.propose(wanted)] == [(4, 5), (4, 5)]


def test_accepted_drafts_are_not_computed_again() -> None:
    model = FakeModel()
    proposer = DraftProposer(model)
    state = proposer.begin()
    model.tokens[0] = [1, 2, 3]
    for _ in range(5):
        known = model.tokens[0]
        (proposed,) = proposer.propose([Wanted(0, np.array(known, np.int32), 4, state)])
        drafts = proposed.token_ids
        known += [*drafts, (drafts[-1] + 1) % 50]
    assert model.num_rows == len(model.tokens[0]) - 2, "all but the last draft and the token behind it"


def test_no_draft_is_made_past_the_end_of_its_context() -> None:
    model = FakeModel()
    proposer = DraftProposer(model)
    model.max_rows = 200
    model.tokens[0] = (list(range(10)) * 12)[:118]
    (drafts,) = proposer.propose([Wanted(0, np.array(model.tokens[0], np.int32), 4, proposer.begin())])
    assert len(drafts) == 2
    model.tokens[0] += [1, 2, 3]
    assert proposer.propose([Wanted(0, np.array(model.tokens[0], np.int32), 4, proposer.begin())]) == [
        NO_DRAFTS
    ]


def test_a_tree_has_the_second_choice_beside_first_drafts() -> None:
    """Of the draft model's chain 4, 5, 6: beside 4 is 5, beside 5 is 6. Sequence 1 has no second choice."""
    model = FakeModel()
    proposer = DraftProposer(model)
    model.tokens = {0: [3], 1: [3]}
    wanted = [Wanted(i, np.array([3], np.int32), 5, proposer.begin(), max_paths=3) for i in range(2)]
    first, second = proposer.propose(wanted)
    assert first.token_ids == (4, 5, 5, 6, 6)
    assert first.parents == (-1, -1, 0, 0, 2)
    assert second.is_chain
    assert second.token_ids == (4, 5, 6, 7, 8)
    assert model.tokens == {0: [3], 1: [3]}
