"""Where native ops put their results, and how they pass tensors: as addresses and strides.

Every op allocates with `empty`, so that a recording controls the addresses.

While a step is recorded (`kernels.tape`) results lie in an `Arena`, whose memory stays where it is. The arena reuses
memory as an allocator does: what Python frees is handed out again, so the addresses that are recorded overlap exactly
as those of a plain run, and a step needs no more memory than that. Outside a recording `empty` is torch's own.

`huge_zeros` is the memory of packed weights, in huge pages where the system supports them. Weights are read from end to
end at every step. With 4 KiB pages the address translation of that stream costs 9 … 25 % of the bandwidth, and more
under a hypervisor: a decode step of SmolLM2-135M took 16.1 ms with them and 11.7 ms with huge pages. Untouched pages
cost no memory.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod

import torch
from torch import Tensor

from quire.kernels.threads import num_native_threads

_CPU = torch.device("cpu")
_LINE = 64  # bytes
_SLAB = 1 << 20  # bytes mapped at a time, or more


class Arena:
    """Mapped memory, which costs nothing until a step is large enough to touch it."""

    def __init__(self) -> None:
        self._slabs: list[mmap.mmap] = []
        self._free: list[tuple[int, int, int]] = []  # (slab, start, end), sorted, none adjacent

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor that keeps its memory until it and its views are gone."""
        num_bytes = prod(shape) * dtype.itemsize
        assert num_bytes > 0, shape
        size = -(-num_bytes // _LINE) * _LINE
        slab, start = self._take(size)
        memory = (ctypes.c_uint8 * num_bytes).from_buffer(self._slabs[slab], start)
        weakref.finalize(memory, self._give_back, slab, start, start + size)
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    @property
    def num_bytes(self) -> int:
        """Bytes mapped: at least what the largest step touches."""
        return sum(len(slab) for slab in self._slabs)

    def _take(self, size: int) -> tuple[int, int]:
        fitting = [span for span in self._free if span[2] - span[1] >= size]
        if not fitting:
            self._slabs.append(mmap.mmap(-1, max(size, _SLAB), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            fitting = [(len(self._slabs) - 1, 0, max(size, _SLAB))]
            self._free.append(fitting[0])
        best = min(fitting, key=lambda span: span[2] - span[1])
        self._free.remove(best)
        slab, start, end = best
        if start + size < end:
            self._free.append((slab, start + size, end))
            self._free.sort()
        return slab, start

    def _give_back(self, slab: int, start: int, end: int) -> None:
        for span in tuple(self._free):
            if span[0] == slab and span[2] == start:
                start = span[1]
                self._free.remove(span)
            elif span[0] == slab and span[1] == end:
                end = span[2]
                self._free.remove(span)
        self._free.append((slab, start, end))
        self._free.sort()


_arena: ContextVar[Arena | None] = ContextVar("arena", default=None)


@contextmanager
def allocating_in(arena: Arena) -> Iterator[None]:
    """`empty` takes from ``arena`` inside the block, on this thread."""
    token = _arena.set(arena)
    try:
        yield
    finally:
        _arena.reset(token)


def address(tensor: Tensor | None) -> int:
    """Return where a tensor lies, as the bindings of native ops take it; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def rows_at(x: Tensor) -> tuple[int, int]:
    """Return where the rows of ``x [rows, size]`` lie, and the elements from row to row."""
    assert x.stride(1) == 1 or x.shape[1] == 1, x.stride()
    return x.data_ptr(), x.stride(0)


def heads_at(x: Tensor) -> tuple[int, int, int]:
    """Return where the heads of ``x [rows, heads, size]`` lie, and the elements from row to row and head to head."""
    assert x.stride(2) == 1 or x.shape[2] == 1, x.stride()
    return x.data_ptr(), x.stride(0), x.stride(1)


def native_call(isa: str, x: Tensor) -> tuple[int, str, bool]:
    """Return what a native call begins with: the threads, the level, and whether ``x`` is bf16 (else fp32)."""
    return num_native_threads(), isa, x.dtype == torch.bfloat16


def unit_stride(x: Tensor) -> Tensor:
    """Return ``x``, or a copy whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty(*shape: int, dtype: torch.dtype, device: torch.device = _CPU) -> Tensor:
    """Return an uninitialised tensor."""
    arena = _arena.get()
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype) if arena is None else arena.empty(shape, dtype)


HUGE = 2 << 20  # bytes of a huge page
# Smaller allocations share a slab: alone, a matrix wastes up to a huge page.
SLAB = 32 * HUGE
LINE = 4096  # bytes; alignment of a matrix in a slab


class _Slab(threading.local):
    """Where the next matrix goes. A slab lives as long as any tensor in it."""

    memory: torch.Tensor | None = None  # uint8
    used = 0


_slab = _Slab()


def huge_zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros that are not touched yet, to be kept: they share huge pages with those before."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if size == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    if size > SLAB:
        return _map(size, is_huge=True)[:size].view(dtype).view(shape)
    start = -(-_slab.used // LINE) * LINE
    if _slab.memory is None or start + size > SLAB:
        _slab.memory, start = _map(SLAB, is_huge=True), 0
    _slab.used = start + size
    return _slab.memory[start : start + size].view(dtype).view(shape)


def mapped(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros in memory of their own, which is taken page by page as it is touched, and given back whole."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.zeros(shape, dtype=dtype) if size == 0 else _map(size, is_huge=False).view(dtype).view(shape)


def _map(size: int, *, is_huge: bool) -> torch.Tensor:
    """Return uint8 ``[size]`` that starts at a page, or at a multiple of 2 MiB."""
    memory = mmap.mmap(-1, size + HUGE * is_huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = 0
    if is_huge:
        memory.madvise(mmap.MADV_HUGEPAGE)
        start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)
