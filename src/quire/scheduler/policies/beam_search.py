"""Beam search: which continuations of a request's beams live on. Selection here; forks and blocks in `beam_steps`.

At each depth every live beam gives its best continuations (the worker's top log-probabilities). Of all of them the best
are looked at, in order: one that ends (a stop id, or the last token there may be) is a finished hypothesis if it is
among the first ``width``; of the others the first ``width`` are the next beams. A hypothesis scores ``sum of its
log-probabilities / length ** length_penalty``. The search ends

    early_stopping true      when ``width`` hypotheses are finished
                   false     when the best beam could not beat the worst of them if it ended now
                   "never"   when it could not even at the greatest length (for a positive length_penalty)

as in transformers, so that its users get its answers (Graves 2012; the penalty is Wu et al. 2016's in a simpler form).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from quire.request import Sampling, TokenLogprobs

Beam = TypeVar("Beam")  # a live beam: the scheduler's `Sequence`, by identity


class Path(NamedTuple):
    """The outputs of a beam or a hypothesis so far, and the sum of their log-probabilities."""

    logprobs: tuple[TokenLogprobs, ...] = ()
    total: float = 0.0

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(entry.token_id for entry in self.logprobs)


class Hypothesis(NamedTuple):
    """A finished path."""

    score: float
    path: Path


class Child(NamedTuple, Generic[Beam]):
    """A continuation that lives on."""

    parent: Beam
    path: Path


class BeamSearch(Generic[Beam]):
    """The state of one request's search. ``stop_ids`` end a hypothesis, and so does its token ``max_outputs``."""

    def __init__(self, sampling: Sampling, stop_ids: frozenset[int], max_outputs: int) -> None:
        self.width = sampling.beam_width
        self.paths: dict[Beam, Path] = {}  # the live beams, best first
        self.found: dict[Beam, TokenLogprobs] = {}  # found by the live beams at this depth
        self.finished: list[Hypothesis] = []  # best first, at most `width`
        self._sampling = sampling
        self._stop_ids = stop_ids
        self._max_outputs = max_outputs

    @property
    def is_complete(self) -> bool:
        """Whether every live beam has given its continuations."""
        return len(self.found) == len(self.paths)

    def select(self) -> list[Child[Beam]]:
        """Go one token deeper; return the next beams, best first, or none where the search has ended."""
        paths = [(parent, path) for parent in self.paths for path in self._continuations(parent)]
        paths.sort(key=lambda item: -item[1].total)  # stable: ties by beam, then by rank
        children: list[Child[Beam]] = []
        for place, (parent, path) in enumerate(paths[: self._sampling.num_top_logprobs]):
            length = len(path.logprobs)
            if path.logprobs[-1].token_id in self._stop_ids or length >= self._max_outputs:
                if place < self.width:
                    self.finished.append(Hypothesis(self._score(path.total, length), path))
            elif len(children) < self.width:
                children.append(Child(parent, path))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self.width :]
        self.found.clear()
        return [] if self._has_ended(children) else children

    def _continuations(self, parent: Beam) -> list[Path]:
        before, entry = self.paths[parent], self.found[parent]
        count = self._sampling.logprobs or 0
        tops = entry.top_token_ids[:count], entry.top_logprobs[:count]
        best = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        return [
            Path((*before.logprobs, TokenLogprobs(token_id, logprob, rank, *tops)), before.total + logprob)
            for rank, (token_id, logprob) in enumerate(best, 1)
        ]

    def _has_ended(self, children: Sequence[Child[Beam]]) -> bool:
        if not children:
            return True
        if len(self.finished) < self.width:
            return False
        early = self._sampling.early_stopping
        if early is True:
            return True
        best = children[0].path
        length = len(best.logprobs)
        if early == "never" and self._sampling.length_penalty > 0.0:
            length = self._max_outputs
        return self._score(best.total, length) <= self.finished[-1].score

    def _score(self, total: float, length: int) -> float:
        penalty: float = float(length) ** self._sampling.length_penalty
        return total / penalty
