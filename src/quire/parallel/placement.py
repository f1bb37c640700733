"""Which node has which ranks, and the axes whose groups lie on several nodes. Pure maths; torch-free.

With no more nodes than stages, the ranks of a stage are on one node. With more, ``nodes / stages`` nodes share a stage,
as many consecutive ranks on each: the tp axis, which exchanges the most bytes, crosses nodes last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from quire.errors import ConfigError
from quire.parallel.topology import AXES, Axis, Topology


@dataclass(frozen=True, slots=True)
class Placement:
    """The bundles of ranks that each run on one node."""

    topology: Topology
    per_bundle: int  # ranks

    @property
    def num_bundles(self) -> int:
        return self.topology.world_size // self.per_bundle

    def bundle_of(self, rank: int) -> int:
        return rank // self.per_bundle

    def num_nodes(self, axis: Axis) -> int:
        """Return on how many nodes each group of ``axis`` lies."""
        return len({self.bundle_of(rank) for rank in self.topology.group(0, axis)})

    @property
    def crossing(self) -> tuple[Axis, ...]:
        """The axes whose ranks exchange over the network. Stages, which have links of their own, do not count."""
        return tuple(axis for axis in AXES if axis != "pp" and self.num_nodes(axis) > 1)

    @property
    def shares_memory(self) -> bool:
        """Whether an axis has its groups within nodes."""
        return any(getattr(self.topology, a) > 1 for a in AXES if a != "pp" and a not in self.crossing)


class Meeting(NamedTuple):
    """Where the ranks of a stage that lies on several nodes find each other: a store of torch.distributed."""

    host: str
    port: int
    own_host: str  # address of this rank's node, where the others connect to
    axes: tuple[Axis, ...]


def place(topology: Topology, nodes: int | None) -> Placement:
    """Return the bundles of ``topology`` over ``nodes``; None: a bundle per stage.

    Raises:
        ConfigError: the stages or the ranks of a stage do not divide over so many nodes.
    """
    per_stage = topology.per_stage
    if nodes is None or nodes <= topology.pp:
        return Placement(topology, per_stage)
    num_nodes, rest = divmod(nodes, topology.pp)
    if rest:
        raise ConfigError(
            f"nodes = {nodes}: {topology.pp} stages do not divide over so many; {_allowed(topology)} are allowed."
        )
    if per_stage % num_nodes:
        raise ConfigError(
            f"nodes = {nodes}: {topology} makes {per_stage} ranks per stage, which do not divide over {num_nodes} "
            f"nodes; {_allowed(topology)} are allowed."
        )
    return Placement(topology, per_stage // num_nodes)


def _allowed(topology: Topology) -> str:
    per_stage = topology.per_stage
    over = [num_nodes * topology.pp for num_nodes in range(2, per_stage + 1) if per_stage % num_nodes == 0]
    return ", ".join(map(str, [*range(1, topology.pp + 1), *over]))
