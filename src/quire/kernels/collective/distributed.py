"""Collectives over torch.distributed: Gloo between the hosts of CPUs, NCCL between GPUs.

Sums gather all members' rows and add them in order: a library's own all_reduce adds in the order of its ring, which
depends on where a row lies in the message. That costs n times the bytes of a ring, for n members.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from quire.kernels.collective import reference


class TorchGroup:
    """A group of torch.distributed; ``None`` is all ranks. The process group must be initialized."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        self.index = dist.get_rank(group)
        self.bytes_sent = 0

    def all_reduce(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        return reference.all_reduce(self._gather(x), out_dtype)

    def all_gather(self, x: Tensor, width: int) -> Tensor:
        return reference.all_gather(self._gather(x), width)

    def reduce_scatter(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        return reference.all_reduce(self._exchange(x), out_dtype)

    def all_to_all(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange(x), dim=1)

    def gather_parts(self, y: Tensor, begins: Sequence[int]) -> None:
        counts = [stop - start for start, stop in pairwise(begins)]
        mine = y.new_zeros(max(counts), y.shape[1])
        mine[: counts[self.index]] = y[begins[self.index] : begins[self.index + 1]]
        parts = zip(self._gather(mine), counts, strict=True)
        y.copy_(reference.gather_parts([part[:count] for part, count in parts]))

    def send(self, x: Tensor) -> None:
        self.bytes_sent += x.nbytes
        dist.send(x.contiguous(), self._rank(self.index + 1), self._group)

    def recv(self, num_tokens: int, size: int, dtype: torch.dtype) -> Tensor:
        y = torch.empty(num_tokens, size, dtype=dtype)
        dist.recv(y, self._rank(self.index - 1), self._group)
        return y

    def _rank(self, index: int) -> int:
        return index if self._group is None else dist.get_global_rank(self._group, index)

    def _gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self.bytes_sent += (self.size - 1) * x.nbytes
        dist.all_gather(parts, x.contiguous(), self._group)
        return parts

    def _exchange(self, x: Tensor) -> list[Tensor]:
        blocks = [reference.block(x, r, self.size).contiguous() for r in range(self.size)]
        out = [torch.empty_like(block) for block in blocks]
        self.bytes_sent += (self.size - 1) * x.nbytes // self.size
        dist.all_to_all(out, blocks, self._group)
        return out
