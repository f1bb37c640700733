"""Collectives over torch.distributed: Gloo between the hosts of CPUs, NCCL between GPUs.

Sums gather all members' rows and add them in order: a library's own all_reduce adds in the order of its ring, which
depends on where a row lies in the message. That costs n times the bytes of a ring, for n members. A sum has the same
bits as one in shared memory, so a group may lie on one node or on several.

A recorded step calls them between segments of native calls (`kernels.tape`).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quire.errors import EngineDeadError
from quire.kernels.collective import LIMIT_S, Group, equal_parts, reference
from quire.kernels.tape import between_segments
from quire.kernels.workspace import empty, unit_stride
from quire.parallel.placement import Meeting
from quire.parallel.topology import Axis, Topology

Transfer = Callable[[Tensor, Tensor], None]  # x → y


class TorchGroup:
    """A process group of torch.distributed, or one of its backends.

    A call raises `EngineDeadError` where a member has ended or does not arrive in time.
    """

    def __init__(self, group: Any = None, name: str = "its group") -> None:
        """``group`` None: all processes, which must be initialized."""
        members: Any = dist.group.WORLD if group is None else group
        self._group, self.size, self.index = members, members.size(), members.rank()
        self.bytes_sent, self._name = 0, name

    def all_reduce(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        return self._run(x, x.shape[1], out_dtype, partial(self._sum, parts=self._gather))

    def all_gather(self, x: Tensor, begins: Sequence[int] | None = None) -> Tensor:
        begins = begins or equal_parts(x.shape[1], self.size)
        return self._run(x, begins[-1], x.dtype, partial(self._side_by_side, begins=begins))

    def reduce_scatter(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        sums = partial(self._sum, parts=self._exchange)
        return self._run(x, x.shape[1] // self.size, out_dtype, sums)

    def all_to_all(self, x: Tensor) -> Tensor:
        return self._run(x, x.shape[1], x.dtype, self._swap)

    def gather_parts(self, y: Tensor, begins: Sequence[int]) -> None:
        counts = [stop - start for start, stop in pairwise(begins)]
        own = y.new_zeros(max(counts), y.shape[1])
        own[: counts[self.index]] = y[begins[self.index] : begins[self.index + 1]]
        parts = zip(self._gather(own), counts, strict=True)
        y.copy_(reference.gather_parts([part[:count] for part, count in parts]))

    def send(self, x: Tensor) -> None:
        self.bytes_sent += x.nbytes
        self._wait(lambda: self._group.send([x.contiguous()], self.index + 1, 0))

    def recv(self, num_tokens: int, size: int, dtype: torch.dtype) -> Tensor:
        y = torch.empty(num_tokens, size, dtype=dtype)
        self._wait(lambda: self._group.recv([y], self.index - 1, 0))
        return y

    def _run(self, x: Tensor, width: int, dtype: torch.dtype, call: Transfer) -> Tensor:
        """Return what ``call(x, y)`` writes, or will write in each replay of the step that is being recorded."""
        x = unit_stride(x)
        y = empty(max(x.shape[0], 1), width, dtype=dtype, device=x.device)[: x.shape[0]]
        if not between_segments(call, x, y):
            call(x, y)
        return y

    def _sum(self, x: Tensor, y: Tensor, parts: Callable[[Tensor], list[Tensor]]) -> None:
        y.copy_(reference.all_reduce(parts(x), y.dtype))

    def _side_by_side(self, x: Tensor, y: Tensor, begins: Sequence[int]) -> None:
        sizes = [stop - start for start, stop in pairwise(begins)]
        same = torch.nn.functional.pad(x, (0, max(sizes) - x.shape[1]))
        parts = zip(self._gather(same), sizes, strict=True)
        y.copy_(reference.all_gather([part[:, :size] for part, size in parts]))

    def _swap(self, x: Tensor, y: Tensor) -> None:
        y.copy_(torch.cat(self._exchange(x), dim=1))

    def _gather(self, x: Tensor) -> list[Tensor]:
        self.bytes_sent += (self.size - 1) * x.nbytes
        out = x.new_empty(self.size, *x.shape)
        if x.numel():
            self._wait(lambda: self._group._allgather_base(_bytes(out), _bytes(x.contiguous())))
        return list(out)

    def _exchange(self, x: Tensor) -> list[Tensor]:
        blocks = torch.stack([reference.block(x, r, self.size) for r in range(self.size)])
        self.bytes_sent += (self.size - 1) * x.nbytes // self.size
        out = torch.empty_like(blocks)
        if x.numel():
            self._wait(lambda: self._group.alltoall_base(_bytes(out), _bytes(blocks), [], []))
        return list(out)

    def _wait(self, start: Callable[[], Any]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            text = str(error).partition("] ")[2].partition(". ")[0] or str(error)
            raise EngineDeadError(f"An exchange over the network with {self._name} failed: {text}") from error


def _bytes(x: Tensor) -> Tensor:
    """Gloo moves bytes of any type so."""
    return x.view(-1).view(torch.uint8)


def connect(
    meeting: Meeting, topology: Topology, rank: int, listener: socket.socket | None,
    limit_s: float = LIMIT_S,
) -> dict[Axis, Group]:  # fmt: skip
    """Return the groups of ``rank`` over Gloo, one for each axis of ``meeting``; every rank must do so once.

    ``listener``: on the rank that holds the store, where the others of its stage reach it.

    Raises:
        EngineDeadError: a rank has not come within ``limit_s`` seconds.
    """
    limit = timedelta(seconds=limit_s)
    groups: dict[Axis, Group] = {}
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            meeting.host, meeting.port, is_master=listener is not None, wait_for_workers=False, timeout=limit,
            master_listen_fd=None if listener is None else listener.detach(),
        )  # fmt: skip
        for axis in meeting.axes:
            ranks = topology.group(rank, axis)
            name = f"{axis} ranks {', '.join(map(str, ranks))}"
            # Torch has no public way to give each group the address that it listens at.
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=meeting.own_host)]
            options._timeout = limit
            of_axis = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
            gloo = dist.ProcessGroupGloo(of_axis, ranks.index(rank), len(ranks), options)
            groups[axis] = TorchGroup(gloo, name)
    except RuntimeError as error:
        raise EngineDeadError(
            f"The ranks of a stage did not meet at {meeting.host}:{meeting.port} within {limit_s:g} s: {error}"
        ) from error
    return groups
