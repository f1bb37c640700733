"""`SimulatedDrafts`: what a worker with drafts answers to the scheduler's plans, with a given acceptance.

The simulated scheduler plans drafts as the engine's does, with the engine's `DraftControl`. A draft at position j is
accepted with probability α_j if those before it are, independently (Leviathan et al. 2023), so a verification of γ
drafts gives (1 − αᵞ⁺¹) / (1 − α) tokens on average. Proposing takes the profile's `DraftCost`, or a share of the time
that the model would take for the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from quire.config import AUTO_DRAFTS, MAX_DRAFTS, SchedulerConfig
from quire.cost.cost_model import StepFeatures, StepTime, chunk_pairs
from quire.cost.draft_cost import DraftCost, DraftLedger, DraftWork
from quire.errors import ConfigError
from quire.executor.timed import Taken
from quire.step import StepPlan


@dataclass(frozen=True, slots=True)
class Speculation:
    """``acceptance``: by position, the last for all behind; ``num_drafts``: γ, None: the engine's control chooses.

    ``draft_cost``: a `DraftCost`, or the time of the draft model as a share of the model's.
    """

    acceptance: tuple[float, ...]
    num_drafts: int | None
    draft_cost: float | DraftCost = 0.0

    def __post_init__(self) -> None:
        if not self.acceptance or not all(0.0 <= rate <= 1.0 for rate in self.acceptance):
            raise ConfigError(f"acceptance = {self.acceptance} must be numbers in 0…1")
        if self.num_drafts is not None and not 1 <= self.num_drafts <= MAX_DRAFTS:
            raise ConfigError(f"num_drafts = {self.num_drafts} must be 'auto' or a number in 1…{MAX_DRAFTS}")
        if isinstance(self.draft_cost, float) and not 0.0 <= self.draft_cost <= 1.0:
            raise ConfigError(f"draft_cost = {self.draft_cost} must be in 0…1")

    @property
    def tokens_per_round(self) -> float:
        """Expected tokens of a verification of γ drafts (of the most that the control may choose)."""
        tokens = share = 1.0
        for place in range(self.num_drafts or AUTO_DRAFTS):
            share *= self.rate(place)
            tokens += share
        return tokens

    @property
    def speedup(self) -> float:
        """Tokens/s against plain decoding where verifying costs no more than a decode step (theorem 3.8)."""
        cost = self.draft_cost if isinstance(self.draft_cost, float) else 0.0
        return self.tokens_per_round / ((self.num_drafts or AUTO_DRAFTS) * cost + 1.0)

    def rate(self, place: int) -> float:
        """Return the acceptance at a position."""
        return self.acceptance[min(place, len(self.acceptance) - 1)]

    def configured(self, config: SchedulerConfig) -> SchedulerConfig:
        """Return ``config`` with drafts."""
        most = AUTO_DRAFTS if self.num_drafts is None else self.num_drafts
        return replace(config, max_num_drafts=most, adaptive_drafts=self.num_drafts is None)


class SimulatedDrafts:
    """The drafts of one worker; `add` is `quire.executor.timed.StepLedger`'s ``add_drafts``."""

    def __init__(
        self, speculation: Speculation, step_time: StepTime, seed: int = 0, *, max_rows: int | None = None
    ) -> None:
        """``max_rows``: of a draft model's forward pass; drafts that cost nothing have no limit."""
        self._speculation, self._step_time = speculation, step_time
        self._ledger = DraftLedger(max_rows if speculation.draft_cost else None)
        self._random = Random(f"drafts {seed}")

    def add(self, plan: StepPlan, taken: Taken) -> Taken:
        """Return the answer to ``plan`` with accepted drafts, drafts for the next step, and the time of proposing."""
        step, results = taken.step, list(taken.result.seqs)
        num_drafts = draft_pairs = 0
        for place, seq in enumerate(plan.seqs):
            result, drafts = results[place], seq.num_draft_tokens
            if not result.token_ids or not (drafts or seq.max_next_drafts):
                continue
            num_drafts += drafts
            draft_pairs += chunk_pairs(seq.num_computed_tokens + seq.num_known_tokens, drafts)
            accepted = self._accepted(drafts)
            results[place] = result._replace(
                token_ids=result.token_ids * (1 + accepted),
                num_tried=min(accepted + 1, drafts),
                num_next_drafts=seq.max_next_drafts,
            )
        step = step._replace(
            num_tokens=step.num_tokens + num_drafts,
            num_logits=step.num_logits + num_drafts,
            decode_kv_tokens=step.decode_kv_tokens + num_drafts,
            draft_pairs=draft_pairs,
        )
        answer = replace(taken.result, seqs=tuple(results))
        draft_s = self._seconds(self._ledger.take(plan, answer), taken)
        if behind := self._ledger.behind:
            results = [
                outcome._replace(num_next_drafts=0) if outcome.seq_id in behind else outcome
                for outcome in results
            ]
        return taken._replace(result=replace(answer, seqs=tuple(results), draft_s=draft_s), step=step)

    def _accepted(self, num_drafts: int) -> int:
        count = 0
        while count < num_drafts and self._random.random() < self._speculation.rate(count):
            count += 1
        return count

    def _seconds(self, work: DraftWork, taken: Taken) -> float:
        cost = self._speculation.draft_cost
        if isinstance(cost, DraftCost):
            return cost.seconds(work)
        if not cost or not work.num_forwards:
            return 0.0
        num_seqs = max(1, round(work.num_drafts / work.num_forwards))
        keys = taken.step.decode_kv_tokens * num_seqs // max(1, taken.num_decodes)
        decode = StepFeatures(num_seqs, num_seqs, num_seqs, keys, 0, 0)
        seconds = work.num_forwards * self._step_time.seconds(decode)
        if work.num_missed:  # they lengthen the first forward pass
            longer = decode._replace(num_tokens=num_seqs + work.num_missed, chunk_pairs=work.num_pairs)
            seconds += self._step_time.seconds(longer) - self._step_time.seconds(decode)
        return cost * seconds
