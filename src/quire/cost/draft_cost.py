"""What proposing drafts takes: its work, read from plans and results, and a fitted `DraftCost`.

    seconds = a · forwards + b · drafts + c · tokens missed + d · pairs + e · keys

A forward pass of a draft model gives one draft to each sequence that still wants one. Tokens missed are those that it
computes beside the last known one: a prompt, or what was decoded while the sequence had no drafts. Pairs are the
(query, key) pairs of tokens missed; keys are those that the other rows read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from quire.cost.cost_model import chunk_pairs
from quire.cost.fit import scaled_nnls
from quire.errors import ConfigError
from quire.step import StepPlan, StepResult


class DraftWork(NamedTuple):
    """The work of proposing in one step."""

    num_forwards: int = 0  # the most drafts of a sequence
    num_drafts: int = 0
    num_missed: int = 0
    num_pairs: int = 0
    num_keys: int = 0


class MeasuredDrafts(NamedTuple):
    """The drafts of one step: ``seconds`` of proposing, and (verified, accepted) of each sequence with drafts."""

    work: DraftWork
    seconds: float
    verified: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds of proposing, and how often drafts are accepted, by position behind accepted ones (empty: unknown)."""

    per_forward_s: float = 0.0
    per_draft_s: float = 0.0
    per_missed_s: float = 0.0
    acceptance: tuple[float, ...] = ()
    per_pair_s: float = 0.0
    per_key_s: float = 0.0

    def seconds(self, work: DraftWork) -> float:
        """Return the seconds of ``work``."""
        return (
            self.per_forward_s * work.num_forwards
            + self.per_draft_s * work.num_drafts
            + self.per_missed_s * work.num_missed
            + self.per_pair_s * work.num_pairs
            + self.per_key_s * work.num_keys
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DraftCost:
        """Return what `to_json` wrote.

        Raises:
            ConfigError: a field is wrong.
        """
        try:
            return cls(**{**data, "acceptance": tuple(data.get("acceptance", ()))})
        except TypeError as error:
            raise ConfigError(f"draft_cost = {data!r} has a wrong field: {error}") from error


def fit_drafts(measured: Sequence[MeasuredDrafts]) -> DraftCost | None:
    """Fit relative errors by non-negative least squares; None: nothing was proposed."""
    made = [case for case in measured if case.work.num_forwards and case.seconds > 0.0]
    if not made:
        return None
    weights = np.array([case.seconds for case in made])
    columns = np.array([case.work for case in made], dtype=float)
    # Weighted first by the measured seconds, then by those that the fit predicts.
    for _ in range(3):
        costs = scaled_nnls(columns / weights[:, None], np.array([case.seconds for case in made]) / weights)
        weights = np.maximum(columns @ costs, weights / 4)
    forward_s, draft_s, missed_s, pair_s, key_s = map(float, costs)
    verified = [pair for case in measured for pair in case.verified]
    return DraftCost(forward_s, draft_s, missed_s, acceptance_of(verified), pair_s, key_s)


def acceptance_of(verified: Sequence[tuple[int, int]]) -> tuple[float, ...]:
    """Return, by position, the share accepted of the drafts whose predecessors were, from (verified, accepted)."""
    most = max((drafts for drafts, _ in verified), default=0)
    tried = [sum(drafts > at and accepted >= at for drafts, accepted in verified) for at in range(most)]
    right = [sum(accepted > at for _, accepted in verified) for at in range(most)]
    return tuple(good / all_ for good, all_ in zip(right, tried, strict=True) if all_)


@dataclass(slots=True)
class _Seq:
    num_known: int
    num_drafted: int  # known tokens that the draft model has computed
    num_ahead: int = 0  # drafts that it computed behind them


class DraftLedger:
    """Follows the sequences of an executor, and says what proposing had to do in each step.

    A step's drafts are made in the order of its sequences. A draft model computes at most ``max_rows`` tokens in a
    forward pass: a sequence of which it missed more gets no drafts until later steps have computed the rest.
    """

    def __init__(self, max_rows: int | None = None, *, cached_prefix: bool = True) -> None:
        """``cached_prefix``: the blocks in which sequences enter have K and V of the draft model, too."""
        self._seqs: dict[int, _Seq] = {}
        self._max_rows = max_rows
        self._cached_prefix = cached_prefix
        self.behind: set[int] = set()  # sequences denied their drafts in the last step

    def take(self, plan: StepPlan, result: StepResult) -> DraftWork:
        """Return the work of proposing in this step."""
        for seq_id in plan.gone:
            self._seqs.pop(seq_id, None)
        fresh = {new.seq_id for new in plan.new_seqs}
        for new in plan.new_seqs:
            self._seqs[new.seq_id] = _Seq(len(new.prompt_token_ids) + len(new.output_token_ids), 0)
        left = self._max_rows
        forwards = drafts = missed = pairs = keys = 0
        self.behind.clear()
        for seq_plan, seq_result in zip(plan.seqs, result.seqs, strict=False):
            seq = self._seqs.get(seq_plan.seq_id)
            if seq is None:
                continue
            if seq_plan.seq_id in fresh and self._cached_prefix:
                seq.num_drafted = seq_plan.num_computed_tokens
            if seq_plan.num_draft_tokens:
                seq.num_drafted += min(max(0, len(seq_result.token_ids) - 1), seq.num_ahead)
            seq.num_ahead = 0
            seq.num_known += len(seq_result.token_ids)
            if not (seq_plan.max_next_drafts and seq_result.token_ids):
                continue
            start, rows = seq.num_drafted, seq.num_known - seq.num_drafted
            if left is not None:
                rows = min(rows, left)
                left -= rows
            seq.num_drafted += rows
            if seq.num_drafted < seq.num_known:
                self.behind.add(seq_plan.seq_id)
            elif count := seq_result.num_next_drafts:
                seq.num_ahead, rows = count - 1, rows - 1
                forwards, drafts = max(forwards, count), drafts + count
                keys += chunk_pairs(seq.num_known - 1, count)
            if rows:
                forwards, missed, pairs = max(forwards, 1), missed + rows, pairs + chunk_pairs(start, rows)
        return DraftWork(forwards, drafts, missed, pairs, keys)
