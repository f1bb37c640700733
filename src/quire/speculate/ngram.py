"""`NgramProposer`: prompt lookup (Saxena 2023). What followed the longest repeated suffix before, follows it again.

A tree has beside it what followed shorter suffixes, where that begins with another token.

    … the cat sat on the mat … the cat sat on
      └─ earlier occurrence ┘ drafts: the mat …   └─ suffix

A suffix of any length is found in O(1) amortized per token (`SuffixAutomaton`), in prompt and output alike.
"""

from __future__ import annotations

from quire.sampling.draft_tree import NO_DRAFTS, Drafts
from quire.speculate.proposer import Wanted
from quire.speculate.suffix_automaton import SuffixAutomaton

MIN_MATCH = 2  # tokens: one token alone repeats too often by chance


class NgramProposer:
    """Proposes the continuation of the last occurrence found of the longest repeated suffix."""

    def begin(self) -> SuffixAutomaton:
        """As `Proposer.begin`."""
        return SuffixAutomaton()

    def propose(self, wanted: list[Wanted]) -> list[Drafts]:
        """As `Proposer.propose`."""
        return [_propose(seq) for seq in wanted]


def _propose(wanted: Wanted) -> Drafts:
    seen: SuffixAutomaton = wanted.state
    token_ids = wanted.token_ids
    seen.extend(token_ids[seen.size :].tolist())
    paths: dict[int, list[int]] = {}  # first token → drafts
    for end, length in seen.occurrences(MIN_MATCH):
        start, limit = end + 1, min(wanted.limit, length)  # a long match goes on for longer
        drafts = token_ids[start : start + limit].tolist()
        period = len(drafts)  # shorter than the limit where the text is periodic
        paths.setdefault(drafts[0], [drafts[place % period] for place in range(limit)])
        if len(paths) == wanted.max_paths:
            break
    return Drafts.from_paths(paths.values(), wanted.limit) if paths else NO_DRAFTS
