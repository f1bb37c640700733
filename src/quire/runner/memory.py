"""Bytes for the KV cache: how many blocks a budget holds, and the storage itself.

Storage is anonymous memory: the system gives a page, zeroed, when it is first touched, so a large pool costs nothing
until it is used.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

import torch

from quire.errors import ConfigError
from quire.kernels.kv_view import KvView, view_layer
from quire.kernels.kvcopy import clear_pages, copy_pages
from quire.kernels.registry import KernelChoice
from quire.modelspec import DTYPE_BYTES, KvLayout, ModelSpec

_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_HUGE = 2 << 20  # bytes of a huge page


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a config's dtype name."""
    if name not in _TORCH:
        raise ConfigError(f"dtype {name!r} is not one of {', '.join(sorted(_TORCH))}.")
    return _TORCH[name]


def num_blocks_of(budget_bytes: int, layout: KvLayout, block_size: int, dtype: str) -> int:
    """Return how many pages ``budget_bytes`` holds (0 when not even one)."""
    return max(0, budget_bytes) // layout.page_bytes(block_size, dtype)


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Return what this process may still take: the lesser of MemAvailable and what the cgroup (v2) leaves."""
    free = 1 << 62
    for line in meminfo.read_text().splitlines() if meminfo.is_file() else []:
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.is_file() and used.is_file():
        text = limit.read_text().strip()
        if text != "max":
            free = min(free, int(text) - int(used.read_text()))
    return max(0, free)


class KvCache:
    """Pages of all layers: ``storage [num_blocks, page_elements]``. See `kernels.kv_view` for what a page holds."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: KvLayout,
        num_blocks: int,
        block_size: int,
        dtype: str,
        kernels: KernelChoice,
    ) -> None:
        page_elements = layout.page_bytes(block_size, dtype) // DTYPE_BYTES[dtype]
        self.storage = _reserve(num_blocks, page_elements, torch_dtype(dtype))
        self.views: tuple[KvView, ...] = tuple(
            _view(self.storage, spec, layout, index, block_size) for index in range(spec.num_layers)
        )
        self._copy_backend = kernels.backend("copy_pages")
        self._clear_backend = kernels.backend("clear_pages")

    def copy(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages (source, target) in list order."""
        copy_pages(self.storage, moves, backend=self._copy_backend)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero pages that a sequence just got: what another left there might be inf or NaN, and 0 · NaN is NaN."""
        if block_ids:
            clear_pages(self.storage, torch.tensor(block_ids, dtype=torch.int64), backend=self._clear_backend)


def _view(storage: torch.Tensor, spec: ModelSpec, layout: KvLayout, index: int, block_size: int) -> KvView:
    a = spec.layers[index].attention
    _, slot = layout.group_of_layer(index)
    if a.is_mla:
        return view_layer(
            storage,
            slot,
            num_kv_heads=1,
            block_size=block_size,
            head_dim=a.kv_elements_per_token,
            v_head_dim=a.kv_lora_rank,
            v_in_k=True,
        )
    return view_layer(
        storage,
        slot,
        num_kv_heads=a.num_kv_heads,
        block_size=block_size,
        head_dim=a.head_dim,
        v_head_dim=a.v_head_dim,
    )


def _reserve(num_blocks: int, page_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Map zeroed memory without touching it; 2 MiB pages where the pool is large (they read 9 … 25 % faster)."""
    assert num_blocks > 0
    size = num_blocks * page_elements * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(
            f"The KV cache of {size / 2**30:.2f} GiB ({num_blocks} blocks) cannot be mapped: {error}; ask for a "
            "smaller one with --kv-memory."
        ) from error
    if size >= 16 * _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(num_blocks, page_elements)
