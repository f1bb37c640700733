"""`LookaheadProposer`: lookahead decoding (Fu et al. 2024). One forward verifies guesses and makes the next.

A window of guessed tokens goes through the model beside the drafts. Column i of level 0 stands i + 1 tokens behind the
last known one; the levels below it go on from there, each a step older:

    last known ── w0[0] ── w0[1] ── w0[2]        level 0 is a path; behind its column i are the other levels of column i
                    │        │        └─ w1[2] ── w2[2] ── sampled: the new last level
                    │        └─ w1[1] ── w2[1] ── sampled
                    └─ w1[0] ── w2[0] ── sampled

What the model samples behind a column makes an n-gram of it, (w0, w1, w2, sampled), and the levels move up (Jacobi
iteration). N-grams that begin with the last known token are the drafts. Those of the text itself are in the pool, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from quire.sampling.draft_tree import Drafts
from quire.speculate.proposer import Wanted

LEVELS = 3  # levels of the window; n-grams have one token more
MAX_KEPT = 8  # n-grams per first token; the one used least recently goes


@dataclass(slots=True)
class LookaheadState:
    """The pool and the window of a sequence."""

    pool: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)  # last added last
    levels: list[list[int]] = field(default_factory=list)  # [LEVELS][width]
    ends: list[int] = field(default_factory=list)  # the last draft of each column, as far as there is one
    size: int = 0  # known tokens seen

    def add(self, ngram: Sequence[int]) -> None:
        ngrams = self.pool.setdefault(ngram[0], {})
        ngrams.pop(tuple(ngram[1:]), None)
        ngrams[tuple(ngram[1:])] = None
        if len(ngrams) > MAX_KEPT:
            del ngrams[next(iter(ngrams))]

    def columns(self) -> Iterator[list[int]]:
        """Yield the tokens of each column."""
        yield from map(list, zip(*self.levels, strict=True))


class LookaheadProposer:
    """Half of the drafts are n-grams of the pool, the others are the window."""

    def begin(self) -> LookaheadState:
        """As `Proposer.begin`."""
        return LookaheadState()

    def propose(self, wanted: list[Wanted]) -> list[Drafts]:
        """As `Proposer.propose`."""
        return [_propose(seq) for seq in wanted]


def _propose(wanted: Wanted) -> Drafts:
    state: LookaheadState = wanted.state
    known = wanted.token_ids.tolist()
    _take_in(state, known, wanted.sampled)
    width = max(1, min(wanted.limit // (2 * LEVELS), wanted.max_paths - 1))
    _fit(state, width, known)
    columns = list(state.columns())
    num_drafts = max(0, wanted.limit - width * LEVELS)
    ngrams = [*state.pool.get(known[-1], ())][::-1]
    drafts = [path for path in ngrams[: wanted.max_paths - width] if path][: -(-num_drafts // LEVELS)]
    window = [[*state.levels[0][: place + 1], *column[1:]] for place, column in enumerate(columns)]
    tree = Drafts.from_paths([*drafts, *window][: wanted.max_paths], wanted.limit)
    state.ends = [_end(tree, path) for path in window]
    return tree


def _take_in(state: LookaheadState, known: list[int], sampled: Sequence[int]) -> None:
    """Put in the pool what the text and the window gave, and move the window on."""
    num_new = len(known) - state.size if state.size else 1
    for end in range(max(state.size, LEVELS + 1), len(known) + 1):
        state.add(known[end - LEVELS - 1 : end])
    state.size = len(known)
    if not sampled or not state.levels:
        return
    made = []
    for column, end in zip(state.columns(), state.ends, strict=True):
        if not 0 <= end < len(sampled) - 1:
            return  # the step had no room for the window: it is tried once more
        made.append(sampled[1 + end])
        state.add([*column, made[-1]])
    # Level 1 of a column stands a token behind level 0, as the step's first token; the others shift the window.
    state.levels = [level[num_new - 1 :] for level in (*state.levels[1:], made)]


def _fit(state: LookaheadState, width: int, known: list[int]) -> None:
    """Make the window as wide as that; tokens of the text are the first guesses."""
    levels = state.levels or [[] for _ in range(LEVELS)]
    filled = []
    for number, level in enumerate(levels):
        more = range(len(level), width)
        filled.append([*level[:width], *(known[(7 * place + 3 * number) % len(known)] for place in more)])
    state.levels = filled


def _end(tree: Drafts, path: Sequence[int]) -> int:
    """Return the last draft of ``path`` in ``tree``; −1: it is not whole there."""
    node, left = -1, list(path)
    for draft, (token_id, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        if left and parent == node and token_id == left[0]:
            node = draft
            left.pop(0)
    return -1 if left else node
