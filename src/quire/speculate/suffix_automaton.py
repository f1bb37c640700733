"""`SuffixAutomaton`: the longest suffix of a growing text that occurred in it before (Blumer et al. 1985).

A state stands for the substrings that end at the same positions; its link leads to the state of their longest suffix
that ends at more positions. Appending a token takes O(1) amortized; a text of n tokens has at most 2n states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class SuffixAutomaton:
    """Append tokens; `suffix_length` and `previous_end` tell of the longest suffix with an earlier occurrence."""

    __slots__ = ("_ends", "_last", "_lengths", "_links", "_next", "previous_end", "size", "suffix_length")

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]  # state → token → state
        self._links = [-1]
        self._lengths = [0]  # longest substring of each state
        self._ends = [-1]  # the last position noted at which the state's substrings end
        self._last = 0
        self.size = 0  # tokens
        self.suffix_length = 0  # tokens; 0: the last token is new
        self.previous_end = -1  # position at which that suffix ended earlier

    @property
    def num_states(self) -> int:
        return len(self._links)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append ``token_ids``."""
        for token_id in token_ids:
            self._append(token_id)

    def occurrences(self, min_length: int) -> Iterator[tuple[int, int]]:
        """Yield (end, length) of earlier occurrences of suffixes of at least ``min_length`` tokens, longest first."""
        if self.suffix_length < min_length:
            return
        yield self.previous_end, self.suffix_length
        state = self._links[self._links[self._last]]
        while state > 0 and self._lengths[state] >= min_length:
            if self._ends[state] < self.size - 1:
                yield self._ends[state], self._lengths[state]
            state = self._links[state]

    def _append(self, token_id: int) -> None:
        follow, links, lengths, ends = self._next, self._links, self._lengths, self._ends
        position = self.size
        state = self._add({}, 0, position + 1, position)
        at = self._last
        while at >= 0 and token_id not in follow[at]:
            follow[at][token_id] = state
            at = links[at]
        if at >= 0:
            target = follow[at][token_id]
            if lengths[target] != lengths[at] + 1:
                target = self._split(at, token_id, target)
            links[state] = target
        suffix = links[state]
        self.suffix_length = lengths[suffix]
        self.previous_end = ends[suffix]
        ends[suffix] = position if suffix else -1
        self._last = state
        self.size = position + 1

    def _split(self, at: int, token_id: int, target: int) -> int:
        """Give the substrings of ``target`` up to one token more than those of ``at`` a state of their own."""
        follow, links = self._next, self._links
        clone = self._add(dict(follow[target]), links[target], self._lengths[at] + 1, self._ends[target])
        links[target] = clone
        while at >= 0 and follow[at].get(token_id) == target:
            follow[at][token_id] = clone
            at = links[at]
        return clone

    def _add(self, follow: dict[int, int], link: int, length: int, end: int) -> int:
        self._next.append(follow)
        self._links.append(link)
        self._lengths.append(length)
        self._ends.append(end)
        return len(self._links) - 1
