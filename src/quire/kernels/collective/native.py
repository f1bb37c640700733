"""Collectives in shared memory (csrc/cpu/collective.h), for ranks on one machine."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.collective import LIMIT_S, Collectives, Group, equal_parts
from quire.kernels.registry import native
from quire.kernels.threads import num_native_threads
from quire.kernels.workspace import empty, unit_stride
from quire.parallel.segment import Lanes, Segment
from quire.parallel.topology import AXES, Axis

REDUCE, GATHER, SCATTER, EXCHANGE, SEND, RECEIVE = range(6)  # `Collective` in C++
_BF16 = {torch.float32: False, torch.bfloat16: True}


def attach(
    segment: Segment, rank: int, limit_s: float = LIMIT_S, *, without: Sequence[Axis] = ()
) -> Collectives:
    """Return the groups of ``rank``; each rank of the topology must do so once, in a process of its own.

    ``without``: axes whose ranks are on several machines.

    Raises:
        ConfigError: the native extension is not built.
    """
    if native is None:
        raise ConfigError(
            "ranks on one machine need the native extension, which is not built: see quire doctor."
        )
    groups: dict[Axis, Group] = {}
    for axis in AXES:
        if getattr(segment.topology, axis) > 1 and axis not in without:
            lanes = Lanes.of_rank(segment.topology, rank, axis, segment.slot_bytes)
            groups[axis] = SharedMemoryGroup(segment, lanes, lanes.ranks.index(rank), limit_s)
    return Collectives(groups)


class SharedMemoryGroup:
    """A group whose members map the same segment.

    A call raises `RuntimeError` where the group was aborted, or a member did not arrive within ``limit_s`` seconds; the
    group is of no use after that.
    """

    def __init__(self, segment: Segment, lanes: Lanes, index: int, limit_s: float) -> None:
        self.size = len(lanes.ranks)
        self.index = index
        self._segment = segment  # the mapping lives as long as the channel
        self._begins: dict[tuple[int, ...], ctypes.Array[Any]] = {}  # per gather; tapes hold the addresses
        base = segment.address
        self.channel = native.Channel(
            base + lanes.abort_word, [base + at for at in lanes.lanes], [base + at for at in lanes.slots],
            list(lanes.ranks), index, lanes.slot_bytes, limit_s,
        )  # fmt: skip

    @property
    def bytes_sent(self) -> int:
        """Counted where they are written, so calls of a recorded step count whenever it is replayed."""
        return int(self.channel.bytes_sent)

    def all_reduce(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        return self._run(REDUCE, x, x.shape[1], out_dtype)

    def all_gather(self, x: Tensor, begins: Sequence[int] | None = None) -> Tensor:
        key = equal_parts(x.shape[1], self.size) if begins is None else tuple(begins)
        assert key[self.index + 1] - key[self.index] == x.shape[1], (key, self.index, x.shape)
        if key not in self._begins:
            self._begins[key] = (ctypes.c_int64 * len(key))(*key)  # a tensor made here would end a recording
        return self._run(GATHER, x, key[-1], x.dtype, ctypes.addressof(self._begins[key]))

    def reduce_scatter(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert x.shape[1] % self.size == 0, (x.shape, self.size)
        return self._run(SCATTER, x, x.shape[1] // self.size, out_dtype)

    def all_to_all(self, x: Tensor) -> Tensor:
        assert x.shape[1] % self.size == 0, (x.shape, self.size)
        return self._run(EXCHANGE, x, x.shape[1], x.dtype)

    def gather_parts(self, y: Tensor, begins: Sequence[int]) -> None:
        assert y.is_contiguous()
        row_bytes = y.shape[1] * y.dtype.itemsize
        native.gather_parts(
            num_native_threads(), self.channel, y.data_ptr(), [row_bytes * at for at in begins]
        )

    def send(self, x: Tensor) -> None:
        assert self.index + 1 < self.size, "the last member has no next one"
        x = unit_stride(x)
        bf16, (num_tokens, size) = _BF16[x.dtype], x.shape
        native.collective(
            num_native_threads(), self.channel, SEND, x.data_ptr(), x.stride(0), bf16, 0, 0, bf16, num_tokens, size, 0
        )  # fmt: skip

    def recv(self, num_tokens: int, size: int, dtype: torch.dtype) -> Tensor:
        assert self.index > 0, "the first member has no previous one"
        y = empty(max(num_tokens, 1), size, dtype=dtype)[:num_tokens]
        bf16 = _BF16[dtype]
        native.collective(
            num_native_threads(), self.channel, RECEIVE, 0, 0, bf16, y.data_ptr(), size, bf16, num_tokens, 0, size
        )  # fmt: skip
        return y

    def _run(self, what: int, x: Tensor, width: int, out_dtype: torch.dtype, begins: int = 0) -> Tensor:
        x = unit_stride(x)
        num_tokens, size = x.shape
        y = empty(max(num_tokens, 1), width, dtype=out_dtype)[:num_tokens]
        native.collective(
            num_native_threads(), self.channel, what, x.data_ptr(), x.stride(0), _BF16[x.dtype], y.data_ptr(), width,
            _BF16[out_dtype], num_tokens, size, width, begins,
        )  # fmt: skip
        return y
