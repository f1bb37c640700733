"""Collectives between the ranks of a group: every rank of the group calls the same ops in the same order.

With x_r the rows of member r, ``[num_tokens, size]``, n members, and i the caller's place among them:

    all_reduce      Σ x_r                                          [num_tokens, size]
    all_gather      x_0 | x_1 | …, side by side                    [num_tokens, Σ size_r], size_r of member r
    reduce_scatter  block i of Σ x_r                               [num_tokens, size / n]
    all_to_all      block i of x_0 | block i of x_1 | …            [num_tokens, size]
    gather_parts    x_0, x_1, …, one after another                 [Σ num_tokens_r, size], num_tokens_r of member r
    send, recv      rows to the next member, from the previous one

Block i of a row is its i-th of n equal parts. Sums are fp32 in the order of the members, rounded once: all ranks have
the same bits, and the bits of a row depend on that row alone. `reference` has these contracts as functions of all
members' rows. A group is used either for send and recv or for the other ops.

Two implementations: `native.SharedMemoryGroup` between processes of one machine, whose calls a tape records like any
native op, and `distributed.TorchGroup` over torch.distributed (Gloo between hosts, NCCL between GPUs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from quire.parallel.topology import Axis

LIMIT_S = 60.0  # for a member to arrive: the longest step of a slow rank


class Group(Protocol):
    """The members of one group, seen from one of them."""

    size: int
    index: int  # the caller's

    @property
    def bytes_sent(self) -> int:
        """Bytes that the caller has sent to the others so far."""
        ...

    def all_reduce(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        """``x`` float32 or bfloat16; the result is of ``out_dtype``."""
        ...

    def all_gather(self, x: Tensor, begins: Sequence[int] | None = None) -> Tensor:
        """Member r has the columns ``begins[r]`` … ``begins[r + 1] − 1`` of the result; None: all have as many."""
        ...

    def reduce_scatter(self, x: Tensor, out_dtype: torch.dtype) -> Tensor: ...

    def all_to_all(self, x: Tensor) -> Tensor: ...

    def gather_parts(self, y: Tensor, begins: Sequence[int]) -> None:
        """Complete ``y``, where member r has the rows ``begins[r]`` … ``begins[r + 1] − 1`` and writes them before.

        Not recorded by a tape, since the sizes are arguments.
        """
        ...

    def send(self, x: Tensor) -> None:
        """To the next member, of which there must be one."""
        ...

    def recv(self, num_tokens: int, size: int, dtype: torch.dtype) -> Tensor:
        """From the previous member, of which there must be one."""
        ...


def equal_parts(size: int, members: int) -> tuple[int, ...]:
    """Return where the columns of each member begin, and where the last ones end, if each has ``size``."""
    return tuple(range(0, size * members + 1, size))


def gathered_parts(group: Group, size: int) -> tuple[int, ...]:
    """Return the same if each has a ``size`` of its own; each member must ask."""
    sizes = group.all_gather(torch.tensor([[float(size)]]))[0]
    return tuple(accumulate(map(int, sizes.tolist()), initial=0))


@dataclass(frozen=True, slots=True)
class Collectives:
    """The groups of one rank, by axis; axes of one rank have none."""

    groups: Mapping[Axis, Group] = field(default_factory=dict)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent in all of its groups."""
        return sum(group.bytes_sent for group in self.groups.values())

    def group(self, axis: Axis) -> Group | None:
        return self.groups.get(axis)

    @property
    def of_layers(self) -> Group | None:
        """The ranks that share every layer: those of the tp axis or of the ep axis."""
        return self.group("tp") or self.group("ep")

    def all_of(self, fine: bool) -> bool:
        """Return whether ``fine`` is true on every rank of the stage; each of them must ask."""
        for group in (self.of_layers, self.group("cp")):
            if group is not None:
                fine = not group.all_reduce(torch.tensor([[float(not fine)]]), torch.float32).item()
        return fine
