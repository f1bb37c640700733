"""`Topology`: the sizes of a group of ranks, and what each rank owns. Pure maths over numbers.

A rank number counts the axes in this order, tensor parallel fastest::

    rank = ((pp · ep_size + ep) · cp_size + cp) · tp_size + tp

so that the ranks that exchange the most bytes are next to each other. Along one axis:

    tp   attention heads, rows and columns of matrices, rows of the vocabulary    (Megatron-LM, arXiv:1909.08053)
    cp   blocks of a sequence, striped: rank r holds the blocks i with i mod cp = r
    ep   as tp, but rows of every matrix, and whole experts. Results are gathered, never added: its bits are one rank's
    pp   layers; the first stage has the embedding, the last one the output matrix

Shares are even to within one unit: sizes need not divide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from quire.errors import ConfigError

Axis = Literal["tp", "cp", "ep", "pp"]
AXES: tuple[Axis, ...] = ("tp", "cp", "ep", "pp")  # fastest first
FIELDS: dict[Axis, str] = {
    "tp": "tensor_parallel_size",
    "cp": "context_parallel_size",
    "ep": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
}
MAX_RANKS = 1024


def share(total: int, parts: int, index: int, unit: int = 1) -> range:
    """Return the part ``index`` of ``range(total)``: consecutive whole units; the last unit may be short.

    The first parts have one unit more where the units do not divide.
    """
    assert 0 <= index < parts
    units = -(-total // unit)
    size, extra = divmod(units, parts)
    begin = index * size + min(index, extra)
    end = begin + size + (index < extra)
    return range(min(total, begin * unit), min(total, end * unit))


@dataclass(frozen=True, slots=True)
class Rank:
    """The coordinates of a rank."""

    tp: int = 0
    cp: int = 0
    ep: int = 0
    pp: int = 0


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention heads of a rank; all of its KV heads have equally many query heads."""

    queries: range
    kv: range


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of the axes. Raises `ConfigError` where one is below 1 or the ranks are too many.

    ``redundant_experts``: copies of experts per layer, beyond one of each, that the ranks of the ep axis hold at least.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    redundant_experts: int = 0

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(f"{FIELDS[axis]} = {size!r}: it must be an integer of at least 1.")
        if self.world_size > MAX_RANKS:
            raise ConfigError(f"{self} makes {self.world_size} ranks; at most {MAX_RANKS} are allowed.")

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.ep * self.cp

    @property
    def per_stage(self) -> int:
        """Ranks of a stage."""
        return self.tp * self.ep * self.cp

    @property
    def answering_rank(self) -> int:
        """The rank that samples and answers: the first of the last stage."""
        return self.rank_of(Rank(pp=self.pp - 1))

    def __str__(self) -> str:
        sizes = [f"{FIELDS[axis]} {size}" for axis in AXES if (size := getattr(self, axis)) > 1]
        return ", ".join(sizes) or "one rank"

    def coordinates(self, rank: int) -> Rank:
        """Return where ``rank`` is on each axis."""
        assert 0 <= rank < self.world_size, rank
        places = {}
        for axis in AXES:
            rank, places[axis] = divmod(rank, getattr(self, axis))
        return Rank(**places)

    def rank_of(self, at: Rank) -> int:
        """Return the number of the rank at these coordinates."""
        number = 0
        for axis in reversed(AXES):
            assert 0 <= getattr(at, axis) < getattr(self, axis), (axis, at)
            number = number * getattr(self, axis) + getattr(at, axis)
        return number

    def group(self, rank: int, axis: Axis) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` on ``axis`` alone, in its order; ``rank`` is one of them."""
        at = self.coordinates(rank)
        places = {name: getattr(at, name) for name in AXES}
        return tuple(self.rank_of(Rank(**(places | {axis: i}))) for i in range(getattr(self, axis)))

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Return every group of ``axis``, each once."""
        return tuple(dict.fromkeys(self.group(rank, axis) for rank in range(self.world_size)))

    def stage_neighbour(self, rank: int, step: int) -> int | None:
        """Return the rank that sends hidden states to ``rank`` (step −1) or receives its own (1); None at the ends."""
        group = self.group(rank, "pp")
        at = group.index(rank) + step
        return group[at] if 0 <= at < len(group) else None

    def layers_of(self, costs: Sequence[float], head: float, stage: int) -> range:
        """Return the layers of a stage: each takes about as long as the others, the last one with the output matrix.

        ``costs``: of each layer; ``head``: of the output matrix, in the same unit. Raises `ConfigError` where a stage
        would have no layer.
        """
        _at_most(self.pp, "pp", len(costs), "layers")
        before = list(accumulate(costs, initial=0.0))
        total, cuts = before[-1] + head, [0]
        for index in range(1, self.pp):
            allowed = range(cuts[-1] + 1, len(costs) - (self.pp - index) + 1)
            wanted = total * index / self.pp
            cuts.append(min(allowed, key=[abs(begin - wanted) for begin in before].__getitem__))
        return range(*[*cuts, len(costs)][stage : stage + 2])

    def experts_of(self, num_experts: int, ep: int) -> range:
        """Return the experts that a rank holds at the start: as many on each, so that some may be on two ranks.

        Raises `ConfigError` where a rank would have none, or one twice.
        """
        flags = f"tensor_parallel_size = {self.ep} with enable_expert_parallel"
        if self.ep > num_experts:
            raise ConfigError(
                f"{flags}: the model has {num_experts} experts; at most {num_experts} ranks are allowed."
            )
        per_rank = -(-(num_experts + self.redundant_experts) // self.ep)
        if per_rank > num_experts:
            raise ConfigError(
                f"num_redundant_experts = {self.redundant_experts}: {flags} and {num_experts} experts, at most "
                f"{(self.ep - 1) * num_experts} are allowed."
            )
        start = min(ep * num_experts // self.ep, num_experts - per_rank)
        return range(start, start + per_rank)

    def heads_of(self, num_heads: int, num_kv_heads: int, tp: int, unit: int = 1) -> Heads:
        """Return the heads of a rank: whole KV heads with all their queries, or a part of one KV head's queries.

        With fewer KV heads than ranks, each KV head is on several ranks, which share its queries. ``unit``: query heads
        that must not be separated, because they lie in one quantization group of the output projection.

        Raises `ConfigError` where a rank would have no head.
        """
        assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
        group_size = num_heads // num_kv_heads  # queries per KV head
        by_rank = []
        if num_kv_heads >= self.tp:
            for rank in range(self.tp):
                kv = share(num_kv_heads, self.tp, rank, -(-unit // group_size))
                by_rank.append(Heads(range(kv.start * group_size, kv.stop * group_size), kv))
        else:
            for head in range(num_kv_heads):
                parts = len(share(self.tp, num_kv_heads, head))  # ranks that have this KV head
                for own in (share(group_size, parts, part, unit) for part in range(parts)):
                    queries = range(head * group_size + own.start, head * group_size + own.stop)
                    by_rank.append(Heads(queries, range(head, head + 1)))
        if not all(heads.queries for heads in by_rank):
            groups = "" if unit == 1 else f", of which {unit} each share a quantization group"
            raise ConfigError(
                f"tensor_parallel_size = {self.tp}: the model has {num_heads} attention heads over {num_kv_heads} KV "
                f"heads{groups}; every rank needs one. Give fewer ranks."
            )
        return by_rank[tp]


def _at_most(size: int, axis: Axis, count: int, what: str) -> None:
    if size > count:
        raise ConfigError(
            f"{FIELDS[axis]} = {size}: the model has {count} {what}; at most {count} is allowed."
        )
