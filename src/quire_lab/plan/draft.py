"""A draft model beside the model (Leviathan et al. 2023), for the planner: its memory, and the time of its drafts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.cost.cost_model import StepFeatures, StepTime
from quire.cost.speculation import TREES
from quire.cost.split import Split, shard_of
from quire.modelspec import ModelSpec
from quire_lab.plan.memory import MemoryPlan, kv_bytes_per_request, kv_ways


@dataclass(frozen=True, slots=True)
class Draft:
    """What proposes ``num_drafts`` tokens a round, each accepted with probability ``acceptance`` after the last.

    ``spec``: the draft model; None: drafts are looked up in the text (n-grams), and take no time or memory.
    """

    model: str
    spec: ModelSpec | None
    acceptance: float
    num_drafts: int

    @property
    def tokens_per_round(self) -> float:
        """Expected tokens of a verification: (1 − αᵞ⁺¹) / (1 − α)."""
        return sum(self.acceptance**place for place in range(self.num_drafts + 1))

    def split_under(self, split: Split) -> Split:
        """Return how the draft model lies on a replica of ``split``: over tp where its heads allow that, else whole."""
        assert self.spec is not None
        heads = min(a.num_heads for a in self.spec.attentions)
        return Split(tp=split.tp if heads % split.tp == 0 else 1)

    def beside(self, memory: MemoryPlan, split: Split, kv_dtype: str, target: ModelSpec) -> MemoryPlan:
        """Return ``memory`` with what drafts for ``target`` take.

        That is the draft model's bf16 weights, its K and V for every request, and states of ``target`` to go back to.
        """
        states = TREES * self.num_drafts * target.state_bytes_per_sequence
        if states:
            memory = _smaller(memory, -(-states // kv_ways(target, split)), split)
        if self.spec is None:
            return memory
        own = self.split_under(split)
        weights = round(shard_of(self.spec, "bf16", own).weight_bytes)
        request = kv_bytes_per_request(self.spec, memory.context, kv_dtype)
        share = memory.kv_request_share + -(-request // kv_ways(self.spec, own))
        memory = replace(memory, draft=memory.draft + weights, kv_request_share=share)
        return _smaller(memory, weights, split)


def _smaller(memory: MemoryPlan, size: int, split: Split) -> MemoryPlan:
    """Return ``memory`` with ``size`` bytes less for requests."""
    pool = memory.kv_pool - size
    fit = max(0, (pool - memory.prefix) // memory.kv_request_share) * split.attention_dp
    return replace(memory, kv_pool=pool, max_requests=fit)


@dataclass(frozen=True, slots=True)
class Drafting:
    """A `Draft` for ``target`` with the step times of the draft model; None: without one."""

    draft: Draft
    target: ModelSpec
    steps: StepTime | None

    def num_drafted(self, seqs: int) -> int:
        """Return how many of ``seqs`` sequences have drafts in a step."""
        return min(seqs, TREES) if self.target.state_layers else seqs

    def tokens_per_round(self, seqs: int) -> float:
        """Return the expected tokens of a step for each of ``seqs`` sequences."""
        return 1.0 + (self.draft.tokens_per_round - 1.0) * self.num_drafted(seqs) / seqs

    def propose_s(self, seqs: int, context: int) -> float:
        """Return the seconds of a round's drafts for ``seqs`` sequences that read ``context`` keys together."""
        if self.steps is None:
            return 0.0
        some = self.num_drafted(seqs)
        keys = context * some // seqs
        return self.draft.num_drafts * self.steps.seconds(StepFeatures(some, some, some, keys, 0, 0))

    def prompt_s(self, chunk: StepFeatures) -> float:
        """Return the seconds in which the draft model computes a chunk of a prompt."""
        return 0.0 if self.steps is None else self.steps.seconds(chunk)
