"""Times of collectives between ranks, α + β · bytes per op and link, and the step times of ranks that pay them.

`quire profile --parallel` measures the links of this machine. `RankedSteps` gives each rank its share of one process's
step, by the weights and heads that `parallel.shard` gives it, and adds its collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from quire.cost.cost_model import CostModel, StepFeatures
from quire.cost.fit import scaled_nnls
from quire.errors import ConfigError
from quire.modelspec import ModelSpec, weight_shapes
from quire.parallel.shard import Shard, shard
from quire.parallel.stripe import DIVIDE_FROM
from quire.parallel.topology import Topology
from quire.parallel.traffic import Use, uses

LINK_OPS = (
    "all_reduce", "all_gather", "all_to_all", "gather_parts", "send", "all_reduce gloo", "all_gather gloo",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LinkCost:
    """``alpha_s`` + ``beta_s`` · bytes that a rank sends; ``points``: those that it was fitted to, (bytes, seconds)."""

    alpha_s: float
    beta_s: float
    points: tuple[tuple[float, float], ...] = ()

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of one collective."""
        return self.alpha_s + self.beta_s * num_bytes

    @classmethod
    def fit(cls, points: Iterable[Sequence[float]]) -> LinkCost:
        """Return the non-negative fit with the least squared relative error."""
        known = tuple((float(size), float(seconds)) for size, seconds in points)
        rows = np.array([[1.0, size] for size, _ in known])
        alpha_s, beta_s = scaled_nnls(rows, np.array([seconds for _, seconds in known])).tolist()
        return cls(alpha_s, beta_s, known)


Links = Mapping[str, LinkCost]  # one of `LINK_OPS` → its time


def links_to_json(links: Links) -> dict[str, Any]:
    """Return plain numbers and lists; `links_from_json` gives the same."""
    return {
        op: {"alpha_s": c.alpha_s, "beta_s": c.beta_s, "points": [list(p) for p in c.points]}
        for op, c in links.items()
    }


def links_from_json(data: Mapping[str, Any]) -> Links:
    """Return what `links_to_json` wrote. Raises `ConfigError` where an op is unknown or a cost below 0."""
    costs = {}
    for op, row in data.items():
        if op not in LINK_OPS:
            raise ConfigError(f"links: unknown op {op!r}; allowed: {', '.join(LINK_OPS)}")
        cost = LinkCost(row["alpha_s"], row["beta_s"], tuple((size, s) for size, s in row.get("points", ())))
        if not (cost.alpha_s >= 0.0 and cost.beta_s >= 0.0):
            raise ConfigError(f"links: {op}: alpha_s and beta_s must be numbers ≥ 0")
        costs[op] = cost
    return costs


# Between two ranks on the loopback device (benchmarks/results/parallel.md); those of a profile take their place.
GLOO: Links = {
    "all_reduce gloo": LinkCost(197e-6, 1.17e-9),
    "all_gather gloo": LinkCost(268e-6, 1.47e-9),
    "send": LinkCost(55e-6, 0.17e-9),
}


def network_seconds(use: Use, num_bytes: float, links: Links, bandwidth: float) -> float:
    """Return the seconds of a collective between machines, of which each sends ``num_bytes`` at ``bandwidth`` bytes/s.

    Gloo passes rows on in a ring: ranks − 1 messages. What it costs without a network comes from ``links`` or `GLOO`.
    """
    op = "send" if use.kind == "send" else f"{use.kind} gloo"
    known = {**GLOO, **links}
    cost = known.get(op, known["all_gather gloo"])
    hops = 1 if use.kind == "send" else use.ranks - 1
    return hops * cost.alpha_s + num_bytes * max(cost.beta_s, 1.0 / bandwidth)


@dataclass(frozen=True, slots=True)
class RankShare:
    """The parts (0…1) of the model's work that a rank does."""

    layers: float  # multiplications of the layers
    head: float  # multiplications of the output matrix
    attention: float  # K and V read, pairs multiplied
    cp: int = 1  # ranks that divide the rows of large steps
    uses: tuple[Use, ...] = field(default=())

    @classmethod
    def of(cls, part: Shard, dtype: str) -> RankShare:
        full, own = weight_shapes(part.whole), part.shapes
        kv = [a.num_kv_heads for a in part.spec.attentions]
        return cls(
            layers=_matrices(own) / _matrices(full),
            head=len(part.vocab) / part.whole.vocab_size if part.is_last else 0.0,
            attention=sum(kv) / sum(a.num_kv_heads for a in part.whole.attentions) / part.topology.cp,
            cp=part.topology.cp,
            uses=uses(part, dtype),
        )


def _matrices(shapes: Mapping[str, tuple[int, ...]]) -> float:
    return float(sum(prod(shape) for name, shape in shapes.items() if name.startswith("layers.")))


class RankedSteps:
    """Step times of a model cut over ranks, each as fast as the process that ``whole`` was measured with.

    ``host_s``, ``host_per_seq_s`` are spent before the first stage, whatever the ranks. A stage takes as long as its
    slowest rank. A plan and an answer cross a socket each, as a send of no bytes.
    """

    def __init__(
        self, single: CostModel, spec: ModelSpec, topology: Topology, links: Links, dtype: str,
        *, host_s: float = 0.0, host_per_seq_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Raises `ConfigError` where the model cannot be cut so, or a link was not measured."""
        self._single, self._links, self._cut = single, links, (spec, topology, dtype)
        self._hop_s = links["send"].alpha_s if "send" in links else 0.0
        self._host_s, self._host_per_seq_s = host_s, host_per_seq_s
        shares = [RankShare.of(shard(spec, topology, rank), dtype) for rank in range(topology.world_size)]
        missing = sorted({use.kind for share in shares for use in share.uses} - set(links))
        if missing:
            raise ConfigError(
                f"{topology}: the profile has no times of {', '.join(missing)}; `quire profile --parallel` "
                "measures them"
            )
        per_stage = topology.world_size // topology.pp
        self._stages = [shares[start : start + per_stage] for start in range(0, len(shares), per_stage)]

    @property
    def num_stages(self) -> int:
        return len(self._stages)

    def plus(self, *, fixed_s: float = 0.0, per_seq_s: float = 0.0) -> RankedSteps:
        """Return the same ranks with more time before the first stage, per step and per sequence."""
        spec, topology, dtype = self._cut
        host_s, host_per_seq_s = self._host_s + fixed_s, self._host_per_seq_s + per_seq_s
        return RankedSteps(
            self._single, spec, topology, self._links, dtype, host_s=host_s, host_per_seq_s=host_per_seq_s
        )

    def seconds(self, step: StepFeatures) -> float:
        """Return the seconds of ``step`` from its first stage to its last."""
        return sum(self.stage_seconds(step))

    def stage_seconds(self, step: StepFeatures) -> tuple[float, ...]:
        """Return the seconds of each stage, without waiting."""
        if not step.num_tokens:
            return (0.0,) * len(self._stages)
        stages = [max(self._rank(share, step) for share in ranks) for ranks in self._stages]
        stages[0] += self._hop_s + self._host_s + self._host_per_seq_s * step.num_seqs
        stages[-1] += self._hop_s
        return tuple(stages)

    def _rank(self, share: RankShare, step: StepFeatures) -> float:
        m, rows = self._single, step.num_tokens
        if rows >= DIVIDE_FROM * share.cp:
            rows = -(-rows // share.cp)
        seconds = share.layers * (m.fixed_s + m.rows.at(rows)) + m.per_seq_s * step.num_seqs
        seconds += share.attention * (
            m.per_decode_kv_s * step.decode_kv_tokens
            + m.spill.at(step.decode_kv_tokens)
            + m.per_chunk_kv_s * step.chunk_kv_tokens
            + m.per_pair_s * step.chunk_pairs
            + m.per_draft_pair_s * step.draft_pairs
        )
        if step.num_logits and share.head:
            seconds += share.head * m.logits.at(step.num_logits)
        return seconds + self._collectives(share.uses, step)

    def _collectives(self, uses: Iterable[Use], step: StepFeatures) -> float:
        return sum(use.count * seconds_of(use, self._links, step.num_tokens, step.num_logits) for use in uses)


def seconds_of(use: Use, links: Links, num_tokens: int, num_logits: int) -> float:
    """Return the seconds of one of the collectives ``use``, of which a step may have none."""
    if not use.num_rows(num_tokens, num_logits):
        return 0.0
    return links[use.kind].seconds(use.sent(num_tokens, num_logits))
